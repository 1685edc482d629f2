"""Weights that are not in nn.Linear, as Linear layers: GPT-2's Conv1D (transposed), experts stacked in one tensor.

Stacked experts are those that transformers declares (`is_transposed`, `has_bias`): their forward asks for
F.linear(x, self.gate_up_proj[e]). `ExpertStack` takes the tensor's place, and its item e sends that call to a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import SparsebitError


class ExpertStack(nn.ModuleList):
    """One layer per expert, where one tensor (experts, outputs, inputs) was."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, Tensor):  # the experts' own forward
            return _Routed(super().__getitem__(int(index)))
        return super().__getitem__(index)


class _Routed:
    """Stands for a weight in F.linear(x, weight), and runs a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or len(args) != 2 or kwargs:
            raise SparsebitError(
                f"stacked experts: {func} on a quantized expert; only F.linear(x, w) can be run"
            )
        return args[1].layer(args[0])


def layer_sizes(block: nn.Module) -> dict[str, int]:
    """Every layer of a block that is quantized, as it is called once unfolded, and its number of weights."""
    found = {}
    for name, module in block.named_modules():
        if type(module) is nn.Linear or is_conv1d(module):
            found[name] = module.weight.numel()
        for leaf, stack in stacks_of(module):
            for e in range(len(stack)):
                found[f"{name}.{leaf}.{e}".lstrip(".")] = stack[e].numel()
    return found


def weight_of(block: nn.Module, name: str) -> Tensor:
    """The float matrix of a layer in a block that is not unfolded."""
    owner, _, leaf = name.rpartition(".")
    module: Any = block
    for part in owner.split(".") if owner else []:
        module = getattr(module, part)
    if isinstance(module, nn.Parameter):
        return module[int(leaf)]
    weight: Tensor = getattr(module, leaf).weight
    return weight


def unfold(block: nn.Module) -> nn.Module:
    """In place: everything that is quantized becomes an nn.Linear."""
    owners: list[Any] = list(block.modules())
    for owner in owners:
        for name, child in list(owner.named_children()):
            if is_conv1d(child):
                setattr(owner, name, _linear(child.weight.detach().T, child.bias))
        for name, stack in list(stacks_of(owner)):
            del owner._parameters[name]
            setattr(owner, name, ExpertStack(_linear(stack[e].detach(), None) for e in range(len(stack))))
            owner.config._experts_implementation = "eager"
    return block


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer: Any = nn.Linear(1, 1, bias=False)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    found: nn.Linear = layer
    return found


def is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and module.weight.dim() == 2


def stacks_of(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The stacked weights of a module: (experts, outputs, inputs), without biases."""
    declared = getattr(module, "is_transposed", None) is False and getattr(module, "has_bias", None) is False
    for name, parameter in module._parameters.items() if declared else ():
        if parameter is not None and parameter.dim() == 3:
            yield name, parameter


def is_routed(block: nn.Module, name: str) -> bool:
    """Whether a layer only gets the tokens that were sent to it."""
    return isinstance(block.get_submodule(name.rpartition(".")[0]), ExpertStack)


def fold_back(plain: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float weights of unfolded layers under the names and in the shapes of `plain`, a block as the model has it."""
    tensors = dict(tensors)
    for name, module in plain.named_modules():
        dot = f"{name}." if name else ""
        if is_conv1d(module) and f"{dot}weight" in tensors:
            tensors[f"{dot}weight"] = tensors[f"{dot}weight"].T.contiguous()
        for leaf, stack in stacks_of(module):
            parts = [tensors.pop(f"{dot}{leaf}.{e}.weight") for e in range(len(stack))]
            tensors[f"{dot}{leaf}"] = torch.stack(parts)
    return tensors


def unfold_tensors(plain: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `fold_back`."""
    tensors = dict(tensors)
    for name, module in plain.named_modules():
        dot = f"{name}." if name else ""
        if is_conv1d(module) and f"{dot}weight" in tensors:
            tensors[f"{dot}weight"] = tensors[f"{dot}weight"].T.contiguous()
        for leaf, _ in stacks_of(module):
            for e, part in enumerate(tensors.pop(f"{dot}{leaf}")):
                tensors[f"{dot}{leaf}.{e}.weight"] = part
    return tensors
