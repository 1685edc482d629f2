"""Resampling. Nearest copies values, so it needs no quantizer; the interpolating modes use at least 8 bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import fx, nn

from sparsebit.quantization.modules.base import Opr, QuantOpr, define, register_qmodule, spelled


class _Resample(QuantOpr):
    """The mode decides at build time whether there is a quantizer."""

    function: ClassVar[Callable[..., Any]] = F.interpolate  # its signature has the place of the mode
    mode: str = "nearest"

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        if isinstance(org_module, nn.Module):
            self.mode = str(org_module.mode)
        elif isinstance(org_module, fx.Node):
            call = inspect.signature(type(self).function).bind(*org_module.args, **org_module.kwargs)
            call.apply_defaults()
            self.mode = str(call.arguments["mode"])

    def build_quantizer(self, config: Any) -> None:
        super().build_quantizer(config)
        assert self.input_quantizer is not None
        if self.mode.startswith("nearest"):
            self.input_quantizer.set_fake_fused()
        else:
            self.input_quantizer.set_bit(max(8, self.input_quantizer.bit))


@register_qmodule(sources=[nn.Upsample])
class QUpsample(_Resample):
    pass


@register_qmodule(sources=[F.interpolate])
class QInterpolate(_Resample):
    pass


@register_qmodule(sources=[F.grid_sample])
class QGridSample(_Resample):
    function = F.grid_sample


AffineGrid = define("AffineGrid", Opr, *spelled("affine_grid affine_grid_generator"))
