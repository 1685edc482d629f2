"""Names that configs, quantizers and backends share."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from sparsebit.config import did_you_mean, fold
from sparsebit.errors import ConfigError

if TYPE_CHECKING:
    import torch

QSCHEMES = ("per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine")


class Granularity(Enum):
    LAYERWISE = 0
    CHANNELWISE = 1


class QuantTarget(Enum):
    WEIGHT = 0
    FEATURE = 1


class Backend(Enum):
    VIRTUAL = 0
    ONNXRUNTIME = 1
    TENSORRT = 2
    OPENVINO = 3


def get_backend(backend: str) -> Backend:
    """`"tensorrt"` (any letter case) -> Backend.TENSORRT. A backend of the user is simulated like VIRTUAL."""
    built_in = [b.name.lower() for b in Backend]
    if fold(str(backend)) not in built_in:
        from sparsebit.export.backends import BACKENDS

        if fold(str(backend)) in BACKENDS:
            return Backend.VIRTUAL
    return Backend[_one_of("BACKEND", backend, built_in).upper()]


def get_qscheme(qscheme: str) -> torch.qscheme:
    """`"per-channel-affine"` -> torch.per_channel_affine."""
    import torch

    name = _one_of("QSCHEME", qscheme, QSCHEMES)
    scheme: torch.qscheme = getattr(torch, name.replace("-", "_"))
    return scheme


def _one_of(key: str, value: str, options: tuple[str, ...] | list[str]) -> str:
    if fold(str(value)) not in options:
        hint = did_you_mean(str(value), options)
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(options)}{hint}")
    return fold(value)
