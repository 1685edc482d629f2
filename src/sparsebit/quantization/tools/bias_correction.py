"""Bias correction: take back the mean error that rounded weights cause (Banner et al. 2019, Nagel et al. 2019).

    shift[c] = sum_j E[x_j] * sum_taps (W - Q(W))[c, j]

E[x_j], the mean of each input channel, streams during calibration. Only the error of the *weights* is taken
back: clipped activations of a few images would dominate a mean of output differences and make it worse
(docs/decisions.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.modules import QuantOpr

ENOUGH_ROWS = 16  # of an image: a mean needs no more


class InputMean:
    """The mean of each input channel of one layer, over everything that flows into it."""

    def __init__(self, module: QuantOpr):
        self.module = module
        self.reset()
        self.handle = module.register_forward_pre_hook(self._hook, with_kwargs=True)

    def reset(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def divide(self, factor: Tensor) -> None:
        """The input is divided by `factor`, channel by channel, from now on."""
        if self.total is not None:
            self.total = self.total / factor.to(self.total)

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            self.update(x)

    def update(self, x: Tensor) -> None:
        x = x.detach()
        axis = self.module.input_axis % x.dim()
        if axis == x.dim() - 3:
            x = x[..., :: max(1, x.shape[-2] // ENOUGH_ROWS), :]
        dims = [d for d in range(x.dim()) if d != axis]
        total = (x.sum(dims, dtype=torch.float32) if dims else x).double()
        self.total = total if self.total is None else self.total + total
        self.count += x.numel() // max(x.shape[axis], 1)

    @torch.no_grad()
    def apply(self) -> None:
        """Set the layer's bias correction; call it once the weight has its scale."""
        self.handle.remove()
        module, quantizer = self.module, self.module.weight_quantizer
        if self.total is None or quantizer is None or quantizer.absorbed or not self.count:
            return
        weight = module.weight
        assert isinstance(weight, Tensor)
        rounded = quantizer._forward(weight, *quantizer._qparams_preprocess(weight))
        assert module.output_shift is not None
        shift = module.output_shift((weight - rounded).double(), self.total / self.count)
        with torch.inference_mode(False):
            module.bias_correction = shift.to(weight.dtype).clone()
