"""Fisher: the expected change of the loss, to second order, if a channel were zero.

Theis et al., Faster Gaze Prediction with Dense Networks and Fisher Pruning, 2018: 1 / 2N times the sum over examples
of (sum over positions of activation * gradient)^2. Of single weights: w^2 * g^2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class FisherSparser(base.Sparser):
    STRATEGY = "fisher"
    JUDGES = "layers that give one tensor, which the loss depends on"
    NEEDS = "gradients"
    COMPARABLE = True

    def __init__(self, config: Any, opr: Any = None):
        super().__init__(config, opr)
        self.change: Tensor | float = 0.0  # of every channel
        self.of_weights: dict[str, Tensor] = {}
        self.examples = 0

    def see(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if self.kind == "structured" and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self._add(layer, output.detach(), gradient))

    def _add(self, layer: Any, output: Tensor, gradient: Tensor) -> None:
        effect = (output * gradient).float().movedim(base.output_axis(layer, output), -1)
        if effect.dim() > 2:
            effect = effect.flatten(1, -2).sum(1)
        self.change = self.change + 0.5 * effect.square().sum(0)
        self.examples += len(effect)

    def see_gradients(self, layer: Any) -> None:
        self.examples += self.kind == "unstructured"
        for name, p in layer.layer_parameters().items():
            if self.kind == "unstructured" and p.grad is not None and p.dim() > 1:
                effect = 0.5 * (p.grad * p).detach().float().square()
                self.of_weights[name] = self.of_weights.get(name, torch.zeros_like(effect)) + effect

    def skips(self, layer: Any) -> bool:
        return not self.of_weights  # the loss does not depend on it

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        return self.of_weights[name] / self.examples

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        if name != "weight" or not self.examples or not base.ends_channels(layer, makes):
            return None
        return base.on_axis(layer, name, torch.as_tensor(self.change) / self.examples)


Sparser = FisherSparser
