"""Value types that every section may use: choices in any spelling, and names of torch devices."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator

from sparsebit.errors import ConfigError


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


def default_device() -> str:
    import torch  # late: reading a config must not be what loads torch or touches CUDA

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_name(value: Any) -> Any:
    import torch

    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, str):
        try:
            torch.device(value)
        except RuntimeError:
            raise ConfigError(f"{value!r} is not a torch device; write cpu, cuda or cuda:0") from None
    return value


Device = Annotated[str, BeforeValidator(_device_name)]
