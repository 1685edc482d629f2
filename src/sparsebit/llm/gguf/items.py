"""The tensors of a model in the order of the file: each is read only when it is written.

An item is a float tensor, a packed layer, or a stack of either (the experts of a mixture). Matrices are
(outputs, inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.llm.models.experts import Expert, ExpertStack, is_conv1d
from sparsebit.numeric.quantized_weight import QuantizedWeight

Value = Tensor | QuantizedWeight


@dataclass(frozen=True)
class Item:
    """`read()` gives one value per part: one, or one per expert."""

    shape: tuple[int, ...]
    parts: tuple[Callable[[], Value], ...]
    packed: bool = False
    dtype: torch.dtype = torch.float32

    def read(self) -> Iterator[Value]:
        for part in self.parts:
            yield part()

    def rows_count(self) -> int:
        """The number of outputs."""
        if len(self.shape) > 1:
            return self.shape[-2]
        return self.shape[0]

    def rows(self, order: Tensor) -> Item:
        """Some of the outputs, in a new order."""
        if len(self.shape) > 1:
            shape = (*self.shape[:-2], len(order), self.shape[-1])
        else:
            shape = (len(order),)
        return self._then(shape, lambda value: take_rows(value, order))

    def map(self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> Item:
        """The values, changed; a packed layer becomes a float tensor."""

        def change(value: Value) -> Value:
            return function(value if isinstance(value, Tensor) else value.dequantize())

        return replace(self._then(shape or self.shape, change), packed=False)

    def _then(self, shape: tuple[int, ...], change: Callable[[Value], Value]) -> Item:
        def after(part: Callable[[], Value]) -> Callable[[], Value]:
            return lambda: change(part())

        return replace(self, shape=shape, parts=tuple(after(part) for part in self.parts))


def take_rows(value: Value, order: Tensor) -> Value:
    if isinstance(value, Tensor):
        return value[order]
    grid = (value.codes[order], value.scales[order], value.zeros[order])
    return QuantizedWeight(*grid, value.bits, value.symmetric, value.group, value.g_idx)


def of_tensor(tensor: Tensor, stacked: bool = False) -> Item:
    """A stack of experts, (experts, outputs, inputs), has one part per expert."""
    if stacked:
        parts = tuple((lambda e=e: tensor[e]) for e in range(len(tensor)))
        return Item(tuple(tensor.shape), parts, dtype=tensor.dtype)
    return Item(tuple(tensor.shape), (lambda: tensor,), dtype=tensor.dtype)


def of_layers(layers: list[Any], stacked: bool = False) -> Item:
    """One packed or float layer per expert, or a single layer."""
    parts = tuple(_reader(layer) for layer in layers)
    shape = (layers[0].out_features, layers[0].in_features)
    packed = isinstance(layers[0], QuantLinear)
    kind = layers[0].dtype if packed else layers[0].weight.dtype
    return Item((len(layers), *shape) if stacked else shape, parts, packed, kind)


def _reader(layer: Any) -> Callable[[], Value]:
    if isinstance(layer, QuantLinear):
        return layer.quantized
    return lambda: layer.weight.detach()


def items_of(model: nn.Module) -> Iterator[tuple[str, Item]]:
    """Every parameter and stored buffer of a model under its name, tied ones once."""
    seen: set[int] = set()
    experts: tuple[str, ...] = ()
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        if isinstance(module, Expert):
            experts = (*experts, dot)
        if experts and f"{name}.".startswith(experts):
            continue  # a part of a stack
        for leaf, stack in vars(module).items():
            if isinstance(stack, ExpertStack):
                yield from _of_stack(f"{dot}{leaf}", stack)
        if isinstance(module, QuantLinear):
            yield f"{dot}weight", of_layers([module])
            if module.bias is not None:
                yield f"{dot}bias", of_tensor(module.bias.detach())
            continue
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for leaf, tensor in {**module._parameters, **kept}.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            turned = is_conv1d(module) and leaf == "weight"
            stacked = tensor.dim() == 3 and "experts" in name
            yield f"{dot}{leaf}", of_tensor(tensor.detach().T if turned else tensor.detach(), stacked)


def _of_stack(name: str, stack: ExpertStack) -> Iterator[tuple[str, Item]]:
    """The layers of all experts; where an expert has two of a fused weight, the gate is the first one."""
    count = len(stack.layers[0])
    owner = name.rpartition(".")[0]
    if count == 1:
        names = [name]
    else:
        names = [f"{owner}.gate_proj", f"{owner}.up_proj"]
    for i, found in enumerate(names):
        layers = [getattr(*expert[i]) for expert in stack.layers]
        yield found, of_layers(layers, stacked=True)
