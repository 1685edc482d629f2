"""Weights that are not in nn.Linear, as Linear layers: GPT-2's Conv1D (transposed), experts stacked in one tensor.

Stacked experts are those that transformers declares (`is_transposed`, `has_bias`): their forward asks for
F.linear(x, self.gate_up_proj[e]). `ExpertStack` takes the tensor's place, and its item e sends that call to the layers
of expert e, which are called as the checkpoint calls them (`0.gate_proj`, `0.up_proj`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import SparsebitError


@dataclass(frozen=True)
class Part:
    """Some outputs of one expert of a stack, as a separate layer."""

    expert: int
    layer: str  # below the module that owns the stack: "0.up_proj"
    rows: tuple[int, int]


Naming = Callable[[str, Any], list[Part]]  # of a stack, by its name and shape


def own_parts(name: str, shape: Any) -> list[Part]:
    """Names of parts for checkpoints that have no names for single experts."""
    leaf = name.rpartition(".")[2]
    return [Part(e, f"{e}.{leaf}", (0, shape[1])) for e in range(shape[0])]


class Expert(nn.Module):
    """The layers of one expert."""


class ExpertStack:
    """One or more layers per expert, where one tensor (experts, outputs, inputs) was."""

    def __init__(self, layers: list[list[tuple[nn.Module, str]]]) -> None:
        self.layers = layers  # of each expert: the module that has the layer, and the layer's name there

    def __getitem__(self, index: Any) -> _Routed:
        return _Routed([getattr(owner, name) for owner, name in self.layers[int(index)]])


class _Routed:
    """Stands for a weight in F.linear(x, weight), and runs layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or len(args) != 2 or kwargs:
            raise SparsebitError(
                f"stacked experts: {func} on a quantized expert; only F.linear(x, w) can be run"
            )
        found = [layer(args[0]) for layer in args[1].layers]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


def layer_sizes(block: nn.Module, naming: Naming = own_parts) -> dict[str, int]:
    """Every layer of a block that is quantized: its name after unfolding, and its number of weights."""
    found = {}
    for name, module in block.named_modules():
        if is_linear(module) or is_conv1d(module):
            found[name] = module.weight.numel()
        for leaf, stack in stacks_of(module):
            for part in naming(_dotted(name, leaf), stack.shape):
                found[_dotted(name, part.layer)] = (part.rows[1] - part.rows[0]) * stack.shape[2]
    return found


def unfold(block: nn.Module, naming: Naming = own_parts) -> nn.Module:
    """Turn every part that is quantized into a Linear layer, in place."""
    owners: list[tuple[str, Any]] = list(block.named_modules())
    for path, owner in owners:
        turn(owner)
        for name, stack in list(stacks_of(owner)):
            del owner._parameters[name]
            layers: list[list[tuple[nn.Module, str]]] = [[] for _ in range(len(stack))]
            for part in naming(_dotted(path, name), stack.shape):
                number, _, leaf = part.layer.rpartition(".")
                if number not in owner._modules:
                    owner.add_module(number, Expert())
                weight = stack[part.expert].detach()[part.rows[0] : part.rows[1]]
                setattr(owner._modules[number], leaf, as_linear(weight, None))
                layers[part.expert].append((owner._modules[number], leaf))
            setattr(owner, name, ExpertStack(layers))
            owner.config._experts_implementation = "eager"
    return block


def turn(owner: nn.Module) -> None:
    """Turn the Conv1D layers of a module into Linear layers, in place."""
    for name, child in list(owner.named_children()):
        if is_conv1d(child):
            setattr(owner, name, as_linear(child.weight.detach().T, child.bias))  # type: ignore[operator, arg-type]


def as_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer: Any = nn.Linear(1, 1, bias=False)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is None:
        layer.bias = None
    else:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    found: nn.Linear = layer
    return found


def is_linear(module: Any) -> bool:
    """nn.Linear, and classes made from it that compute the same: they are tried on a few numbers."""
    if type(module) is nn.Linear:
        return True
    if not isinstance(module, nn.Linear) or "weight" not in module._parameters:
        return False
    probe = copy.copy(module)
    weight = torch.arange(6.0).reshape(2, 3) - 1.5
    x = torch.tensor([[0.5, -1.0, 2.0]])
    if module.bias is None:
        bias = None
    else:
        bias = torch.tensor([0.25, -3.0])
    probe.__dict__["_parameters"] = {"weight": weight, "bias": bias}
    probe.in_features = 3
    probe.out_features = 2
    try:
        with torch.no_grad():
            found = type(module).forward(probe, x)
    except Exception:  # whatever it needs, it is more than x, weight and bias
        return False
    return isinstance(found, Tensor) and torch.equal(found, F.linear(x, weight, bias))


def is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and module.weight.dim() == 2


def stacks_of(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The stacked weights of a module: (experts, outputs, inputs), without biases."""
    declared = getattr(module, "is_transposed", None) is False and getattr(module, "has_bias", None) is False
    for name, parameter in module._parameters.items() if declared else ():
        if parameter is not None and parameter.dim() == 3:
            yield name, parameter


def is_routed(block: nn.Module, name: str) -> bool:
    """True if a layer only gets the tokens that were sent to it."""
    return isinstance(block.get_submodule(name.rpartition(".")[0]), Expert)


def fold_back(
    plain: nn.Module, tensors: dict[str, Tensor], naming: Naming, packed: Container[str] = ()
) -> dict[str, Tensor]:
    """Float weights of unfolded layers under the names and in the shapes of `plain`, a block as the model has it.

    packed  layers that are no float weights any more.
    """
    tensors = dict(tensors)
    for name, module in plain.named_modules():
        if is_conv1d(module) and name not in packed and _dotted(name, "weight") in tensors:
            tensors[_dotted(name, "weight")] = tensors[_dotted(name, "weight")].T.contiguous()
        for leaf, stack in stacks_of(module):
            parts = naming(_dotted(name, leaf), stack.shape)
            whole = _dotted(name, leaf) in tensors
            if whole or any(_dotted(name, part.layer) in packed for part in parts):
                continue
            experts: list[list[Tensor]] = [[] for _ in range(len(stack))]
            for part in parts:
                experts[part.expert].append(tensors.pop(f"{_dotted(name, part.layer)}.weight"))
            tensors[_dotted(name, leaf)] = torch.stack([torch.cat(rows) for rows in experts])
    return tensors


def unfold_tensors(
    plain: nn.Module, tensors: dict[str, Tensor], naming: Naming, packed: Container[str] = ()
) -> dict[str, Tensor]:
    """The inverse of `fold_back`."""
    tensors = dict(tensors)
    for name, module in plain.named_modules():
        if is_conv1d(module) and name not in packed and _dotted(name, "weight") in tensors:
            tensors[_dotted(name, "weight")] = tensors[_dotted(name, "weight")].T.contiguous()
        for leaf, stack in stacks_of(module):
            if _dotted(name, leaf) not in tensors:  # packed
                continue
            whole = tensors.pop(_dotted(name, leaf))
            for part in naming(_dotted(name, leaf), stack.shape):
                rows = whole[part.expert, part.rows[0] : part.rows[1]]
                tensors[f"{_dotted(name, part.layer)}.weight"] = rows.contiguous()
    return tensors


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)
