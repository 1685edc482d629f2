"""DictForm: a config can be read like a dict, as the configs of the original. Keys are shown in upper case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparsebit.config.messages import unknown_option
from sparsebit.config.values import shown
from sparsebit.errors import UnknownOptionError


class DictForm:
    """`cfg["W"]["QSCHEME"]`, `"W" in cfg`, `for key in cfg`, `cfg.get("MY_KEY", 0)`, `dict(cfg)`."""

    def __getitem__(self: Any, name: str) -> Any:
        key = self.key(name)
        options = self._options()
        try:
            if key in options:
                return shown(options[key])
            return self._absent(key)
        except AttributeError:
            raise UnknownOptionError(f"{name}: {unknown_option(name, self.option_names())}") from None

    def __contains__(self: Any, name: object) -> bool:
        key = self.key(name) if isinstance(name, str) else ""
        return key in self._options() or self.section(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self: Any) -> list[str]:
        return [name.upper() for name in self._options()]

    def values(self: Any) -> list[Any]:
        return [shown(value) for value in self._options().values()]

    def items(self) -> list[tuple[str, Any]]:
        return list(zip(self.keys(), self.values()))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (this is `get`)
