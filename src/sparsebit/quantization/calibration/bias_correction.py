"""Bias correction: take back the mean error that rounded weights cause (Banner et al. 2019, Nagel et al. 2019).

    shift[c] = sum_j E[x_j] * sum_taps (W - Q(W))[c, j]

E[x_j], the mean of each input channel, streams during calibration. Only the error of the *weights* is taken
back: clipped activations of a few images would dominate a mean of output differences and make it worse
(docs/decisions.md). A layer without bias that sees padding (rows of zeros) gets none: it hands zeros on as zeros, and a
norm behind it would blow a small shift up to full size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.observers.ranks import RunningSum

ENOUGH_ROWS = 16  # of an image: a mean needs no more


class InputMean:
    """The mean of each input channel of one layer, over everything that flows into it."""

    def __init__(self, module: QuantOpr):
        self.module = module
        self.reset()
        self.handle = module.register_forward_pre_hook(self._hook, with_kwargs=True)

    def reset(self) -> None:
        self.sum = RunningSum()
        self.padded = False

    def divide(self, factor: Tensor) -> None:
        """The input is divided by `factor`, channel by channel, from now on."""
        self.sum.divide(factor)

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            self.update(x)

    def update(self, x: Tensor) -> None:
        x = x.detach()
        axis = self.module.input_axis % x.dim()
        if axis == x.dim() - 3:
            x = x[..., :: max(1, x.shape[-2] // ENOUGH_ROWS), :]
        if self.module.bias is None and axis == x.dim() - 1 and not self.padded:
            self.padded = not x.any(-1).all()
        dims = [d for d in range(x.dim()) if d != axis]
        total = (x.sum(dims, dtype=torch.float32) if dims else x).double()
        self.sum.add(total, x.numel() // max(x.shape[axis], 1))

    @torch.no_grad()
    def apply(self) -> None:
        """Set the layer's bias correction; call it once the weight has its scale."""
        self.handle.remove()
        module = self.module
        quantizer = self.module.weight_quantizer
        if not self.sum.count or quantizer is None or quantizer.absorbed or self.padded:
            return
        weight = module.weight
        assert isinstance(weight, Tensor)
        rounded = quantizer.rounded(weight)
        assert module.output_shift is not None
        shift = module.output_shift((weight - rounded).double(), self.sum.mean())
        with torch.inference_mode(False):
            module.bias_correction = shift.to(weight.dtype).clone()
