"""Registry: key -> implementation. Every extension point uses it.

A registry is a MutableMapping, and a missing name raises an error with close names. A plug-in of the user may
replace a built-in one, with a warning; two different plug-ins of the user under one name are refused.
`discover` imports every file of a package, so a new file is enough to add a plug-in.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import pkgutil
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

from sparsebit.errors import RegistryError

T = TypeVar("T")
log = logging.getLogger("sparsebit")


def plain_name(name: Hashable) -> Hashable:
    """`LSQ_plus`, `lsq-plus` and `lsq+` are the same plug-in; non-strings are their own key."""
    if not isinstance(name, str):
        return name
    return name.strip().lower().replace("-", "_").replace("_plus", "+")


class Registry(MutableMapping[Any, T], Generic[T]):
    """Names (any letter case) or objects (module classes, functions) to implementations."""

    def __init__(self, what: str):
        self.what = what  # "observer": used in messages
        self._items: dict[Hashable, T] = {}

    def register(self, *keys: Hashable, replace: bool = False) -> Callable[[T], T]:
        """Decorator. With no keys the class is registered under its `TYPE`."""

        def add(item: T) -> T:
            self.add(keys or self._type_of(item), item, replace=replace)
            return item

        return add

    def add(self, keys: Iterable[Hashable], item: T, replace: bool = False) -> None:
        """Register `item` under every key. All keys are checked before the first one is taken."""
        keys = list(keys)
        replaced: dict[str, list[Hashable]] = {}  # built-in plug-in -> the keys that `item` takes over
        for key in keys:
            known = self._items.get(plain_name(key))
            if known is None or replace or _same_definition(known, item):
                continue
            if _is_built_in(known) == _is_built_in(item):
                raise RegistryError(
                    f"{self.what} {_show(key)} is already registered by {_show(known)}; "
                    f"choose another name, or take its place with .add([{_show(key)}], ..., replace=True)"
                )
            if _is_built_in(known):
                replaced.setdefault(_show(known), []).append(key)
        for name, taken in replaced.items():
            log.warning(
                "%s %s: %s replaces the built-in %s in this process",
                *(self.what, ", ".join(map(_show, taken)), _show(item), name),
            )
        self.update(dict.fromkeys(keys, item))

    def _type_of(self, item: Any) -> tuple[Hashable, ...]:
        name = getattr(item, "TYPE", None)
        if not name:
            raise RegistryError(f"{self.what} {_show(item)} needs a class attribute TYPE = '<its name>'")
        return (name,)

    def __getitem__(self, key: Hashable) -> T:
        try:
            return self._items[plain_name(key)]
        except KeyError:
            raise RegistryError(f"unknown {self.what} {_show(key)}{self.hint(key)}") from None

    def __setitem__(self, key: Hashable, item: T) -> None:
        self._items[plain_name(key)] = item

    def __delitem__(self, key: Hashable) -> None:
        self[key]  # raises an error with close names
        del self._items[plain_name(key)]

    def hint(self, key: Hashable) -> str:
        """`; did you mean X?`, or the list of all names."""
        names = sorted(k for k in self._items if isinstance(k, str))
        close = difflib.get_close_matches(str(plain_name(key)), names, 1)
        if close:
            return f"; did you mean {close[0]}?"
        if names:
            return f"; known: {', '.join(names)}"
        return ""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, Hashable) and plain_name(key) in self._items

    def __repr__(self) -> str:
        return f"Registry({self.what}: {', '.join(map(_show, self._items))})"

    def discover(self, package: str) -> None:
        """Import every module of `package`; each registers its plug-ins."""
        paths = importlib.import_module(package).__path__
        for info in pkgutil.iter_modules(paths):
            if not info.name.startswith("_"):
                importlib.import_module(f"{package}.{info.name}")


def _is_built_in(item: Any) -> bool:
    """Is this class or function a part of Sparsebit?"""
    return str(getattr(item, "__module__", "")).split(".")[0] == "sparsebit"


def _same_definition(a: Any, b: Any) -> bool:
    """Is it the same class, defined again by a reload or a notebook cell? It may replace itself."""
    if a is b:
        return True
    where = [(getattr(x, "__module__", None), getattr(x, "__qualname__", None)) for x in (a, b)]
    return None not in where[0] and where[0] == where[1]


def _show(x: Any) -> str:
    if isinstance(x, str):
        return repr(x)
    name = getattr(x, "__qualname__", None)
    if name:
        return f"{getattr(x, '__module__', '')}.{name}".strip(".")
    return repr(x)
