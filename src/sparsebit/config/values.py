"""Forms of a value: choices in any spelling, numbers as text, keys that no config defines."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationInfo


def fold(text: str) -> str:
    """`Per_Tensor_Affine` and `per-tensor-affine` are the same choice."""
    return text.strip().lower().replace("_", "-")


@dataclass(frozen=True)
class Choices:
    """The built-in names of an option that is a text, in its annotation; plug-ins may add others."""

    names: tuple[str, ...]


@functools.cache
def choices(cls: type[BaseModel]) -> dict[str, dict[str, str]]:
    """For every option that is a Literal of strings, or has Choices: folded spelling -> the usual spelling."""
    found = {}
    for name, field in cls.model_fields.items():
        if get_origin(field.annotation) is Literal:
            options = get_args(field.annotation)
        else:
            options = ()
        options = options or next((known.names for known in field.metadata if isinstance(known, Choices)), ())
        if options and all(isinstance(option, str) for option in options):
            found[name] = {fold(option): option for option in options}
    return found


@functools.cache
def numbers(cls: type[BaseModel]) -> frozenset[str]:
    """The options that are numbers or true and false."""
    kinds = {}
    for name, field in cls.model_fields.items():
        kinds[name] = get_args(field.annotation) or (field.annotation,)
    return frozenset(
        name for name, found in kinds.items() if {bool, int, float} & {*found} and str not in found
    )


def literal(value: Any) -> Any:
    """'4' -> 4, 'True' -> True; all other values are not changed."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def is_text(info: ValidationInfo) -> bool:
    """Do the values come from a file, where numbers may stand in quotes?"""
    return bool((info.context or {}).get("text"))


@dataclass(frozen=True)
class NewKey:
    """The value of a key that no config class defines, set by a script. It is not checked."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)

    def merged(self, change: Any) -> NewKey:
        if isinstance(change, NewKey):
            return change
        return NewKey(_merged(self.value, change))


def shown(value: Any) -> Any:
    """An option as code reads it."""
    if isinstance(value, NewKey):
        return value.value
    return value


def _merged(old: Any, change: Any) -> Any:
    """`change` in place of `old`; mappings are merged key by key."""
    if not isinstance(old, MutableMapping) or not hasattr(change, "items"):
        return change
    new = copy.copy(old)
    for key, value in change.items():
        new[key] = _merged(old.get(key), value)
    return new


def plain(value: Any) -> Any:
    """`value` in a form that YAML can hold; a type that YAML does not know is written as its text."""
    if hasattr(value, "items"):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if type(value) in (str, int, float, bool, type(None)):
        return value
    return str(value)
