"""Layers of a class that changes the forward: a Conv2d that pads by the size of its input, a Linear that casts.

A forward that cannot be traced runs unchanged, on a quantized input and with the quantized weight in the place of the
weight.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsebit.quantization.modules.base import QMODULE_MAP, QuantOpr, register_qmodule

_MADE: dict[type[nn.Module], type[nn.Module]] = {}


class OwnForward(QuantOpr):
    """Mixed into the user's class: the same forward, quantized."""

    users_class: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.quantize_first(args, kwargs)
        weight = self._parameters.pop("weight")
        self.__dict__["weight"] = weight if self.weight_quantizer is None else self.weight_quantizer(weight)
        try:
            return self.users_class.forward(self, *args, **kwargs)
        finally:
            del self.__dict__["weight"]
            self._parameters["weight"] = weight


def own_forward(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The quantized form of `cls`, a subclass of a known layer with a weight that changes the forward; or None."""
    known = next((QMODULE_MAP[base] for base in cls.__mro__[1:] if base in QMODULE_MAP), None)
    if known is None or not issubclass(known, QuantOpr) or not known.quantize_weight:
        return None
    if not issubclass(known, nn.Module) or not hasattr(known, "reset_parameters"):
        return None  # an activation: it has no weight
    if cls not in _MADE:
        _MADE[cls] = type(f"Q{cls.__name__}", (OwnForward, cls), _members(cls, known))
    return _MADE[cls]


def _members(cls: type[nn.Module], known: type[QuantOpr]) -> dict[str, Any]:
    return {
        "users_class": cls,
        "weight_axis": known.weight_axis,
        "input_axis": known.input_axis,
        "quantize_input": known.quantize_input,
        "__doc__": OwnForward.__doc__,
    }


@register_qmodule(sources=["transformers.pytorch_utils.Conv1D"])
class QConv1D(QuantOpr):
    """GPT-2's linear layer: the weight is (in, out)."""

    weight_axis = 1
    input_axis = -1

    def adopt(self, module: nn.Module) -> None:
        self.weight = module.weight
        self.bias = module.bias

    def forward(self, x: Any) -> Any:
        return self.quantized_input(x) @ self.quantized_weight() + self.bias
