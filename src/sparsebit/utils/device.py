"""Device: the DEVICE option of a config, a name that torch understands. torch is loaded when one is read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from sparsebit.errors import ConfigError


def default_device() -> str:
    import torch  # late: importing a config must neither load torch nor touch CUDA

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


def usable_device(name: str) -> Any:
    """The torch device that DEVICE names, which this machine must have."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
        why = str(error).partition("\n")[0]
        raise ConfigError(f"DEVICE: {name} cannot be used on this machine: {why}; write cpu") from error
    return torch.device(name)


Device = Annotated[str, BeforeValidator(_device_name)]
