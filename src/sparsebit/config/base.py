"""Config: a section of typed options. Frozen by default, readable as `cfg.W.QUANTIZER.BIT`, written as YAML.

The verbs of yacs (`clone defrost merge_from_list merge_from_file merge_from_other_cfg freeze dump`,
`cfg["W"]`, `for key in cfg`) work on it, so that scripts written for the original configs keep running.
`override` is the short way to a changed copy.

A script may add keys: after `defrost()`, `cfg.MY_KEY = 1` is kept, copied and dumped, and its value is not
checked. Two things are refused: a name close to an option with a value that the option accepts (most likely a
typo), and a new key in a file.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from sparsebit.config import schema
from sparsebit.config.dict_form import DictForm
from sparsebit.config.messages import closest, refusal, show, unknown_option
from sparsebit.config.values import NewKey, choices, fold, is_text, literal, numbers, plain, shown
from sparsebit.config.yaml_io import read_yaml, write_yaml
from sparsebit.errors import ConfigError, FrozenConfigError, UnknownOptionError

if TYPE_CHECKING:
    from typing_extensions import Self


class _Extra(NamedTuple):
    """A key that is not a field of `owner`, on its way to the validator."""

    owner: type[Config]
    name: str
    value: Any


def _read_extra(given: _Extra, info: ValidationInfo) -> Any:
    if isinstance(given.value, NewKey):
        return given.value
    return given.owner.read_extra(given.name, given.value, info)


class Config(DictForm, BaseModel):  # type: ignore[misc] # (pydantic iterates over pairs)
    """Base of every section, and of the `Params` of a plug-in. Give every option a default.

    Types are strict (no "8" or true for an integer), an integer may stand for a float, and a Literal of
    strings is read in any letter case, with `-` or `_`.
    """

    # "always": a section that is passed in is checked and copied, never shared between two configs
    model_config = ConfigDict(extra="allow", strict=True, revalidate_instances="always")
    __pydantic_extra__: dict[str, Annotated[Any, PlainValidator(_read_extra)]]
    _frozen: bool = PrivateAttr(default=True)

    def __init__(self, /, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise refusal(error) from None

    # pydantic calls __init__ of nested models only if they changed it. Ours only translates the error of the
    # outermost one, and must not hide from pydantic where in the tree a problem is.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    # -- what a subclass may define ------------------------------------------------------------------
    @classmethod
    def prepare(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Rewrite old spellings before validation; keys are lower-case here."""
        return options

    def verify(self) -> None:
        """Raise ConfigError for options that do not fit together; text may start with `KEY: `."""

    @classmethod
    def key(cls, name: str) -> str:
        """The stored form of an option's name."""
        return name.lower()

    @classmethod
    def section(cls, name: str) -> type[Config] | None:
        """The class of the option `name` if it is a section."""
        kind = None
        if name in cls.model_fields:
            kind = cls.model_fields[name].annotation
        if isinstance(kind, type) and issubclass(kind, Config):
            return kind
        return None

    @classmethod
    def option_names(cls) -> list[str]:
        return [name.upper() for name in cls.model_fields]

    @classmethod
    def is_set_first(cls, path: str) -> bool:
        """If several options change: does the default of another option depend on this one?"""
        return False

    @classmethod
    def read_extra(cls, name: str, value: Any, info: ValidationInfo) -> Any:
        """The checked value of a key that is not a field; ConfigError if there is no such option."""
        raise UnknownOptionError(unknown_option(name, cls.option_names()))

    @classmethod
    def is_option(cls, key: str) -> bool:
        """Can `read_extra` or a field take a value for `key`?"""
        return key in cls.model_fields

    def _absent(self, key: str) -> Any:
        """The value of an option that is not a field and was not given; AttributeError if there is none."""
        if key in type(self).__class_vars__:
            return getattr(type(self), key)
        raise AttributeError(key)

    # -- reading -------------------------------------------------------------------------------------
    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(data, Config):
            data = data._options()  # a config of another class
        if data is None:
            data = {}  # `OBSERVER:` with nothing below it
        if not hasattr(data, "items"):
            raise ConfigError(f"expected a section of options (KEY: value), got {show(data)}")
        options: dict[str, Any] = {}
        for given, value in data.items():
            key = cls.key(str(given))
            if key in options:
                raise ConfigError(f"{key.upper()}: given twice, in two spellings; keep one of them")
            if isinstance(value, str):
                value = choices(cls).get(key, {}).get(fold(value), value)
                if is_text(info) and key in numbers(cls):
                    value = literal(value)
            options[key] = value
        options = cls.prepare(options)
        found = {}
        for k, v in options.items():
            found[k] = v if k in cls.model_fields else _Extra(cls, k, v)
        return found

    @model_validator(mode="after")
    def _verify(self, info: ValidationInfo) -> Self:
        # while a defrosted config is edited key by key, options need not fit together yet
        if not (info.context or {}).get("draft"):
            self.verify()
        return self

    @classmethod
    def _build(cls, data: Any, draft: bool = False, text: bool = False) -> Self:
        """draft: options need not fit together yet. text: `"8"` and `"True"` in quotes are read like numbers,
        as yacs does."""
        try:
            return cls.model_validate(data, context={"draft": draft, "text": text})
        except ValidationError as error:
            raise refusal(error) from None

    @classmethod
    def load(cls, source: Any) -> Self:
        """Read a config from a YAML file, a mapping, or another config (checked and copied). The result is frozen."""
        if not isinstance(source, (str, os.PathLike)):
            return cls._build(source)
        data = read_yaml(source)
        try:
            return cls._build(data, text=True)
        except ConfigError as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in {os.fspath(source)}")
            raise

    def _options(self) -> dict[str, Any]:
        return {**self.__dict__, **(self.__pydantic_extra__ or {})}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)  # type: ignore[misc]
        key = self.key(name)
        extra = self.__pydantic_extra__ or {}
        if key in extra:
            return shown(extra[key])
        if key != name and (key in type(self).model_fields or hasattr(type(self), key)):
            return getattr(self, key)
        try:
            return self._absent(key)
        except AttributeError:
            what = unknown_option(name, self.option_names())
            raise AttributeError(f"{type(self).__name__}.{name}: {what}") from None

    # -- writing -------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Upper-case keys and JSON-like values, as in the YAML file."""
        options = self._options()
        fields = {name for name, value in options.items() if not isinstance(value, (Config, NewKey))}
        json_like = self.model_dump(mode="json", include=fields)
        found: dict[str, Any] = {}
        for name, value in options.items():
            found[name.upper()] = json_like[name] if name in fields else _plain(value)
        return found

    def dump(self, **options: Any) -> str:
        """The config as YAML; `options` are those of `yaml.dump`."""
        return write_yaml(self.to_dict(), **options)

    def __str__(self) -> str:
        return self.dump()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and type(self) is type(other) and self._options() == other._options()

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON schema of the YAML."""
        return schema.object_schema(cls)

    # -- changing ------------------------------------------------------------------------------------
    def override(self, *pairs: Any) -> Self:
        """A changed, frozen copy: `cfg.override("W.QUANTIZER.BIT", 4, "A.OBSERVER.TYPE", "mse")`."""
        return type(self)._build(self._changed(pairs))

    def clone(self) -> Self:
        return copy.deepcopy(self)

    def is_frozen(self) -> bool:
        return self._frozen

    def defrost(self) -> None:
        """Allow assignments, here and in every section below."""
        self._mark(False)

    def freeze(self) -> None:
        """Check everything, also across sections, and refuse assignments from here on."""
        self._adopt(type(self)._build(self))
        self._mark(True)

    def merge_from_list(self, pairs: Sequence[Any]) -> None:
        """`[KEY, value, KEY, value, ...]`; values may be text from a command line, as with yacs."""
        self._refuse_if_frozen("merge_from_list")
        self._adopt(self._changed([literal(item) if i % 2 else item for i, item in enumerate(pairs)]))

    def merge_from_file(self, path: str | os.PathLike[str]) -> None:
        """Put the options of a YAML file on top."""
        self._refuse_if_frozen("merge_from_file")
        self._adopt(type(self)._build(self._merged(read_yaml(path)), draft=True, text=True))

    def merge_from_other_cfg(self, other: Config | Mapping[str, Any]) -> None:
        """Put all options of another config on top."""
        self._refuse_if_frozen("merge_from_other_cfg")
        changes: Mapping[str, Any] = other._tree() if isinstance(other, Config) else other
        self._adopt(type(self)._build(self._merged(changes), draft=True))

    def without_new_keys(self) -> Self:
        """A copy with the options that the config classes define: a file of them can be loaded again."""
        return type(self)._build(self._tree(new_keys=False), draft=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            return super().__setattr__(name, value)
        self._refuse_if_frozen(name.upper())
        self._apply(name, value)

    __setitem__ = __setattr__

    def _refuse_if_frozen(self, what: str) -> None:
        if self._frozen:
            raise FrozenConfigError(
                f"{what}: this config is frozen; cfg.override('KEY', value) gives a changed copy, "
                f"clone() and defrost() one that can be edited"
            )

    def _apply(self, path: str, value: Any) -> None:
        """Set one option in place; the key may be new."""
        *sections, name = path.split(".")
        owner: Any = self
        for part in sections:
            if isinstance(owner, Config):
                owner = owner.get(part)
            else:
                owner = None
        if isinstance(owner, Config) and owner._is_new(name, value):
            owner._set(owner.key(name), NewKey(value))
        else:
            self._adopt(self._changed([path, value]))

    def _is_new(self, name: str, value: Any) -> bool:
        """Is `name` neither an option, nor a typo of one, nor a method?"""
        cls = type(self)
        key = self.key(name)
        if self.is_option(key) or key in cls.__class_vars__ or hasattr(cls, name):
            return False
        close = closest(name, self.option_names())
        return close is None or not self._accepts(close, value)

    def _accepts(self, name: str, value: Any) -> bool:
        try:
            self._changed([name, value])
        except ConfigError:
            return False
        return True

    def _changed(self, pairs: Sequence[Any]) -> Self:
        """A copy with `KEY, value, ...` set one after the other; not yet checked across options."""
        if len(pairs) % 2:
            raise ConfigError(
                f"expected KEY, value, KEY, value, ..., got {len(pairs)} items: {show(list(pairs))}"
            )
        changes = list(zip(pairs[::2], pairs[1::2]))
        for path, _ in changes:
            if not isinstance(path, str):
                raise ConfigError(f"expected a key such as 'QUANTIZER.BIT', got {show(path)}")
        new = self
        for path, value in sorted(changes, key=lambda change: not self.is_set_first(change[0])):
            for part in reversed(path.split(".")):
                value = {part: value}
            new = type(self)._build(new._merged(value), draft=True)
        return new

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The options with `changes` on top; sections are merged key by key."""
        options = self._options()
        for name, value in changes.items():
            key = self.key(str(name))
            old = options.get(key)
            if isinstance(old, NewKey):
                options[key] = old.merged(value)
            elif key in type(self).__class_vars__:
                self._refuse_other_value(key, value)
            elif isinstance(old, Config) and hasattr(value, "items") and not isinstance(value, Config):
                options[key] = old._merged(value)
            else:
                options[key] = value
        return options

    def _refuse_other_value(self, key: str, value: Any) -> None:
        """The original set W.TARGET and A.TARGET while it built quantizers; here they are constants."""
        constant = getattr(type(self), key)
        if value != constant:
            raise ConfigError(f"{key.upper()}: is always {show(constant)} here, and cannot be {show(value)}")

    def _tree(self, new_keys: bool = True) -> dict[str, Any]:
        """The options as nested dicts."""
        found: dict[str, Any] = {}
        for name, value in self._options().items():
            if new_keys or not isinstance(value, NewKey):
                found[name] = value._tree(new_keys) if isinstance(value, Config) else value
        return found

    def _adopt(self, new: Config) -> None:
        """Take the values of `new` in place, so that references to sections stay good."""
        mine = self._options()
        theirs = new._options()
        for name in mine.keys() - theirs.keys():
            del self.__pydantic_extra__[name]
        for name, value in theirs.items():
            if isinstance(value, Config) and type(mine.get(name)) is type(value):
                mine[name]._adopt(value)
            else:
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, Config):
            value._mark(self._frozen)
        if name in type(self).model_fields:
            store = self.__dict__
        else:
            store = self.__pydantic_extra__
        store[name] = value

    def _mark(self, frozen: bool) -> None:
        self._frozen = frozen
        for value in self._options().values():
            if isinstance(value, Config):
                value._mark(frozen)


# As an object: pydantic before 2.12 evaluates a text in the module of each subclass.
Config.__annotations__["__pydantic_extra__"] = dict[str, Annotated[Any, PlainValidator(_read_extra)]]


def _plain(value: Config | NewKey) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    return plain(value.value)
