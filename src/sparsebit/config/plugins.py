"""A section with a TYPE, or another key that selects; every registered plug-in adds a sub-section of options.

`OBSERVER: {TYPE: percentile, PERCENTILE: {ALPHA: 0.01}}` is checked against `Params` of the class that is
registered as "percentile", so a new plug-in needs no edit here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ValidationInfo, field_validator

from sparsebit.config import schema
from sparsebit.config.base import Config
from sparsebit.errors import ConfigError
from sparsebit.registry import Registry, plain_name

Section = type[Config]  # inside the class below, `type` is an option


class PluginConfig(Config):
    selector: ClassVar[str] = "type"  # the option that names the plug-in; subclasses define it

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The registry of TYPE. It is imported late, because plug-ins import configs."""
        raise NotImplementedError

    @property
    def plugin(self) -> Any:
        """The class that TYPE names."""
        return self.registry()[getattr(self, self.selector)]

    def params(self, name: str | None = None) -> Any:
        """Options of the selected plug-in, or of the one called `name`; defaults for options that were not
        given."""
        name = str(plain_name(name or getattr(self, self.selector)))
        given = (self.__pydantic_extra__ or {}).get(name)
        if given is not None:
            return given
        return _params_class(self.registry()[name])()

    @field_validator("*")
    @classmethod
    def _registered(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name != cls.selector:
            return value
        registry = cls.registry()
        if value not in registry:
            raise ConfigError(f"{value!r} is not a registered {registry.what}{registry.hint(value)}")
        return str(plain_name(value))

    @classmethod
    def read_extra(cls, name: str, value: Any, info: ValidationInfo) -> Any:
        """The options of one plug-in."""
        params = cls.section(name)
        if params is None:
            return super().read_extra(name, value, info)
        return params.model_validate(value, context=info.context)

    @classmethod
    def is_option(cls, key: str) -> bool:
        return super().is_option(key) or key in cls.registry()

    @classmethod
    def key(cls, name: str) -> str:
        if name.lower() in cls.model_fields:
            return name.lower()
        return str(plain_name(name))

    @classmethod
    def section(cls, name: str) -> Section | None:
        if name in cls.model_fields:
            return super().section(name)
        if name in cls.registry():
            return _params_class(cls.registry()[name])
        return None

    @classmethod
    def option_names(cls) -> list[str]:
        return super().option_names() + list(cls._sections())

    @classmethod
    def _sections(cls) -> dict[str, Section]:
        """Plug-ins with options, by key."""
        found = {str(name).upper(): _params_class(plugin) for name, plugin in cls.registry().items()}
        return {name: params for name, params in found.items() if params.model_fields}

    def _absent(self, key: str) -> Any:
        if key not in self.registry():
            return super()._absent(key)
        params = self.params(key)
        if not self.is_frozen():
            self._set(key, params)  # so that `cfg.OBSERVER.PERCENTILE.ALPHA = 0.01` is kept
        return params

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        section = super().json_schema()
        kind = section["properties"][cls.selector.upper()]
        kind.update(schema.any_case(map(str, cls.registry())))
        del kind["type"]
        section["properties"] |= {name: params.json_schema() for name, params in cls._sections().items()}
        return section


def _params_class(plugin: Any) -> type[Config]:
    params: type[Config] = getattr(plugin, "Params", Config)
    return params
