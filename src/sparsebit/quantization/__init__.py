"""Quantization: QuantModel and everything it is made of. Start reading at pipeline.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["QuantModel", "parse_qconfig"]

if TYPE_CHECKING:
    from sparsebit.quantization.quant_config import parse_qconfig
    from sparsebit.quantization.quant_model import QuantModel


def __getattr__(name: str) -> Any:
    # late, so that a sub-package (numeric plug-ins, config) can be imported without the whole
    if name == "QuantModel":
        from sparsebit.quantization.quant_model import QuantModel

        return QuantModel
    if name == "parse_qconfig":
        from sparsebit.quantization.quant_config import parse_qconfig

        return parse_qconfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
