"""Quantizers. A new file here that registers a class with a TYPE is a new quantizer."""

from __future__ import annotations

from typing import Any, TypeVar

from sparsebit.quantization.quantizers.base import Mode, Quantizer
from sparsebit.registry import Registry

__all__ = ["QUANTIZERS_MAP", "Mode", "Quantizer", "build_quantizer", "register_quantizer"]

QUANTIZERS_MAP: Registry[type[Quantizer]] = Registry("quantizer")
Q = TypeVar("Q", bound=type[Quantizer])


def register_quantizer(cls: Q) -> Q:
    """`@register_quantizer` on a class with a TYPE. One that replaces another keeps the options of its section."""
    known = QUANTIZERS_MAP.get(cls.TYPE)
    if known is not None and cls.Params is Quantizer.Params:
        cls.Params = known.Params  # type: ignore[misc]
    QUANTIZERS_MAP.register()(cls)
    return cls


def build_quantizer(cfg: Any) -> Quantizer:
    """The quantizer that `cfg` (the W or A section of a config) names."""
    return QUANTIZERS_MAP[cfg.quantizer.type](cfg)


QUANTIZERS_MAP.discover(__name__)
