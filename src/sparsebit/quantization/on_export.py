"""The quantizers of a model while it is exported, and while the certificate compares it with the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.graph.run.modes import evaluating
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Mode, Quantizer


def quant_oprs(gm: Any) -> Iterator[tuple[str, QuantOpr]]:
    """Every op with quantizers, and its path in the user's model."""
    seen: set[nn.Module] = set()
    for node in gm.graph.nodes:
        if node.op != "call_module":
            continue
        for inside, module in gm.get_submodule(str(node.target)).named_modules():
            if isinstance(module, QuantOpr) and module not in seen:
                seen.add(module)
                yield f"{node.meta.get('path', node.name)}.{inside.removeprefix('root.')}".strip("."), module


def used_quantizers(qmodel: Any) -> Iterator[tuple[str, Quantizer, Tensor | None]]:
    """Path of the layer, quantizer, and the weight it rounds: None for an activation."""
    for path, module in quant_oprs(qmodel.model):
        for quantizer, weight in ((module.input_quantizer, None), (module.weight_quantizer, module.weight)):
            if quantizer is not None and not quantizer.absorbed and not quantizer.unused:
                yield path, quantizer, weight


@contextmanager
def exporting(qmodel: Any, hook: Callable[[Quantizer, Tensor], Tensor]) -> Iterator[None]:
    """Every quantizer calls `hook` in place of rounding; flags and modes come back, also after an error."""
    quantizers = [m for m in qmodel.model.modules() if isinstance(m, Quantizer)]
    modes = [q.mode for q in quantizers]
    try:
        for q in quantizers:
            q.mode = Mode.EXPORT
            q.on_export = hook
        with torch.no_grad(), evaluating(qmodel):
            yield
    finally:
        for q, mode in zip(quantizers, modes):
            q.mode = mode
            q.on_export = None


@contextmanager
def with_bias(qmodel: Any, biases: Mapping[str, Any]) -> Iterator[None]:
    """Layers compute with the bias that the file has: rounded to the grid of input times weight."""
    saved: list[tuple[nn.Module, Any, Any]] = []
    try:
        for module in qmodel.model.modules():
            name = ""
            if isinstance(module, QuantOpr) and module.weight_quantizer:
                name = module.weight_quantizer.name
            if name not in biases:
                continue
            saved.append((module, module._parameters.get("bias"), module.bias_correction))
            bias = torch.from_numpy(biases[name].values).to(module.weight)
            module._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
            module.bias_correction = None
        yield
    finally:
        for module, bias, correction in saved:
            module._parameters["bias"] = bias
            module.bias_correction = correction
