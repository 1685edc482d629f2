"""Choices (a Literal of strings) in any spelling."""

from __future__ import annotations

import functools
from typing import Literal, get_args, get_origin

from pydantic import BaseModel


def fold(text: str) -> str:
    """`Per_Tensor_Affine` and `per-tensor-affine` are the same choice."""
    return text.strip().lower().replace("_", "-")


@functools.cache
def choices(cls: type[BaseModel]) -> dict[str, dict[str, str]]:
    """For every option that is a Literal of strings: folded spelling -> the spelling of the Literal."""
    found = {}
    for name, field in cls.model_fields.items():
        options = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        if options and all(isinstance(option, str) for option in options):
            found[name] = {fold(option): option for option in options}
    return found
