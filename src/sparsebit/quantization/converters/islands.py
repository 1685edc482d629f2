"""Islands run their own code; the layers inside them are quantized in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsebit.quantization.modules import Opr, qmodule_of
from sparsebit.quantization.modules.own_forward import own_forward


def quantize_inside(module: nn.Module, config: Any) -> int:
    """Replace every layer with a weight matrix below `module` by its QModule; returns their number.

    Norms and activations are not replaced: without a graph it is unknown which ops are fused with them.
    """
    made: dict[nn.Module, nn.Module] = {}
    _swap(module, config, made)
    return len(made)


def _swap(module: nn.Module, config: Any, made: dict[nn.Module, nn.Module]) -> None:
    for name, child in list(module._modules.items()):
        if child is None or isinstance(child, Opr):
            continue
        if child not in made:
            cls = quantized_class(child)
            if cls is None:
                _swap(child, config, made)
                continue
            made[child] = cls(child, config)
            made[child].training = child.training
        module._modules[name] = made[child]
    if isinstance(module, nn.TransformerEncoder):
        module.enable_nested_tensor = module.use_nested_tensor = False  # its fast path skips the layers


def quantized_class(module: nn.Module) -> type[nn.Module] | None:
    """The replacement of a layer with a weight matrix: its QModule, or its own forward, quantized."""
    if not any(p.dim() > 1 for p in module.parameters()):
        return None
    return qmodule_of(type(module)) or own_forward(type(module))
