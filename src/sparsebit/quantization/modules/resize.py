"""Resizing. Nearest copies values, so it needs no quantizer; the interpolating modes use at least 8 bits."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from sparsebit.quantization.modules.base import QuantOpr, register_qmodule


class _Resize(QuantOpr):
    mode: str = "nearest"

    def build_quantizer(self, config: Any) -> None:
        super().build_quantizer(config)
        assert self.input_quantizer is not None
        if self.mode.startswith("nearest"):
            self.input_quantizer.set_fake_fused()
        else:
            self.input_quantizer.set_bit(max(8, self.input_quantizer.bit))


@register_qmodule(sources=[nn.Upsample])
class QUpsample(_Resize):
    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        self.mode = org_module.mode


@register_qmodule(sources=[F.interpolate])
class QInterpolate(_Resize):
    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        if isinstance(org_module, fx.Node):  # the mode decides at build time whether there is a quantizer
            call = inspect.signature(F.interpolate).bind(*org_module.args, **org_module.kwargs)
            call.apply_defaults()
            self.mode = str(call.arguments["mode"])
