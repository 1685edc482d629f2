"""JSON schema of a config's YAML, so that editors complete keys and underline typos."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter

from sparsebit.config.values import choices

if TYPE_CHECKING:
    from sparsebit.config.base import Config


def object_schema(cls: type[Config]) -> dict[str, Any]:
    """One section: upper-case keys, nothing else allowed. Options are plain values: nothing needs $defs."""
    properties = {}
    for name, field in cls.model_fields.items():
        section = cls.section(name)
        if section:
            leaf = section.json_schema()
        elif name in choices(cls):
            leaf = any_case(choices(cls)[name].values())
        else:
            annotated: Any = Annotated[field.annotation, field]
            leaf = TypeAdapter(annotated).json_schema()
        if field.description:
            leaf["description"] = field.description
        if field.default_factory is None and not field.is_required():
            leaf["default"] = field.default
        properties[name.upper()] = leaf
    return {"type": "object", "additionalProperties": False, "properties": properties}


def any_case(names: Iterable[str]) -> dict[str, Any]:
    """The names, which editors offer, or the same names in another spelling."""
    names = list(names)
    return {
        "anyOf": [{"enum": names}, {"type": "string", "pattern": f"^({'|'.join(map(_spellings, names))})$"}]
    }


def _spellings(name: str) -> str:
    """A pattern for `name` with any case, and with `-`, `_` and `plus` in place of each other and of `+`."""
    return "".join(map(_spelling, name))


def _spelling(character: str) -> str:
    if character.isalpha():
        return f"[{character.upper()}{character.lower()}]"
    if character in "-_":
        return "[-_]"
    if character == "+":
        return r"(\+|[-_][Pp][Ll][Uu][Ss])"
    return re.escape(character)
