"""Cutting: parameters lose the positions whose labels go, and the sizes that the graph has as literals follow.

`masked` keeps every shape and zeroes what goes; `compact` removes it. Both compute the same, which is checked node by
node before a compact model is handed out.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import SparsebitError
from sparsebit.sparse.channels import Walk, run_bound
from sparsebit.sparse.literals import rewrite

TOLERANCE = 1e-5  # of the largest value


class Cut:
    """What is left of `walk.gm` when the classes `dropped` go."""

    def __init__(self, walk: Walk, dropped: Tensor):
        self.walk, self.dropped = walk, dropped

    def keeps(self, labels: Tensor) -> Tensor:
        return self.walk.keeps(labels, self.dropped)

    def axes(self, labels: Tensor) -> dict[int, Tensor]:
        """By axis that loses something: which of its positions are kept."""
        found = {}
        for axis in self.walk.labels.varies(labels):
            kept = self.keeps(labels.movedim(axis, 0).reshape(labels.shape[axis], -1)[:, 0])
            if not bool(kept.all()):
                found[axis] = kept
        return found

    def shape(self, labels: Tensor) -> list[int]:
        lost = self.axes(labels)
        return [int(lost[d].sum()) if d in lost else n for d, n in enumerate(labels.shape)]

    def of_value(self, value: Tensor, labels: Tensor) -> Tensor:
        """The part of a value that is kept."""
        for axis, kept in self.axes(labels).items():
            value = value.index_select(axis, kept.nonzero().flatten().to(value.device))
        return value

    # -- the two models ------------------------------------------------------------------------------
    def masked(self) -> fx.GraphModule:
        """Same shapes, zeros where something goes. A layer norm takes its statistics from what is kept."""
        gm = copy.deepcopy(self.walk.gm)
        for cut in self.walk.slices.values():
            tensor = _tensor(gm, cut.path)
            kept = self.keeps(cut.labels).to(tensor.device)
            line = [-1 if d == cut.axis else 1 for d in range(tensor.dim())]
            if not cut.path.endswith(("running_mean", "running_var")):
                with torch.no_grad():
                    tensor.mul_(kept.view(line))
        for path, labels in self.walk.normed.items():
            if not bool(self.keeps(labels).all()):
                norm = MaskedNorm(gm.get_submodule(path), self.keeps(labels))
                _set_module(gm, path, norm)
        return gm

    def compact(self) -> fx.GraphModule:
        """Really smaller."""
        gm = copy.deepcopy(self.walk.gm)
        self.cut_parameters(gm)
        run_bound(_Rewriter(self, gm), self.walk)
        for node in gm.graph.nodes:
            node.type = None  # annotations as strings cannot be pickled
        gm.graph.lint()
        gm.recompile()
        return gm

    def cut_parameters(self, model: nn.Module) -> None:
        """Slice the parameters of `model`, which has the paths of the graph, and set the sizes of its layers."""
        new: dict[int, Any] = {}
        for cut in self.walk.slices.values():
            kept = self.keeps(cut.labels)
            if bool(kept.all()):
                continue
            old = _tensor(model, cut.path)
            source = new.get(id(old), old)
            index = kept.nonzero().flatten().to(source.device)
            sliced = source.detach().index_select(cut.axis, index).clone()
            new[id(old)] = (
                nn.Parameter(sliced, old.requires_grad) if isinstance(old, nn.Parameter) else sliced
            )
        for module in model.modules():  # also where a parameter is shared
            for names in (module._parameters, module._buffers):
                for name, value in names.items():
                    if value is not None and id(value) in new:
                        names[name] = new[id(value)]
        for path, attribute, labels in self.walk.sizes:
            left = int(self.keeps(labels).sum())
            setattr(
                model.get_submodule(path), attribute, (left,) if attribute == "normalized_shape" else left
            )


class MaskedNorm(nn.Module):
    """LayerNorm or RMSNorm over the channels that are kept; the others are zero."""

    kept: Tensor

    def __init__(self, norm: Any, kept: Tensor):
        super().__init__()
        self.norm = copy.deepcopy(norm)
        self.register_buffer("kept", kept.nonzero().flatten())
        for name in ("weight", "bias"):
            value = getattr(norm, name, None)
            if value is not None:
                setattr(self.norm, name, nn.Parameter(value.detach()[self.kept], value.requires_grad))
        self.norm.normalized_shape = (len(self.kept),)

    def forward(self, input: Tensor) -> Tensor:
        out = self.norm(input.index_select(-1, self.kept))
        return torch.zeros_like(input).index_copy(-1, self.kept, out)


class _Rewriter(fx.Interpreter):
    """Runs the cut graph on the example; literal sizes that no longer fit are replaced on the way."""

    def __init__(self, cut: Cut, gm: fx.GraphModule):
        super().__init__(gm, garbage_collect_values=False)
        self.cut = cut
        self.old = {node.name: node for node in cut.walk.gm.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        old = self.old[n.name]
        if n.op.startswith("call"):
            rewrite(self.cut, n, old, self)
        labels = self.cut.walk.of[old]
        try:
            value = super().run_node(n)
        except Exception as error:
            raise SparsebitError(f"{_where(old)}: does not run on the pruned shapes: {error}") from error
        for got, have in zip(pytree.tree_leaves(value), pytree.tree_leaves(labels)):
            if (
                isinstance(got, Tensor)
                and isinstance(have, Tensor)
                and list(got.shape) != self.cut.shape(have)
            ):
                raise SparsebitError(
                    f"{_where(old)}: has the shape {list(got.shape)} after pruning, where {self.cut.shape(have)} "
                    f"was expected; its channel rule, or the size it is given, does not follow the channels"
                )
        return value


class _Values(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = pytree.tree_map_only(Tensor, torch.clone, value)
        return value


def check_equal(cut: Cut, masked: fx.GraphModule, compact: fx.GraphModule) -> None:
    """Raise, and name the first node that differs, unless both models compute the same."""
    big, small = _Values(masked.eval()), _Values(compact.eval())
    run_bound(big, cut.walk), run_bound(small, cut.walk)
    for node in cut.walk.gm.graph.nodes:
        if node.op == "get_attr":
            continue
        pairs = zip(
            pytree.tree_leaves(big.values[node.name]),
            pytree.tree_leaves(small.values[node.name]),
            pytree.tree_leaves(cut.walk.of[node]) if node.op != "output" else iter(lambda: None, 0),
        )
        for want, got, labels in pairs:
            if isinstance(want, Tensor) and want.is_floating_point() and want.numel():
                want = cut.of_value(want, labels) if isinstance(labels, Tensor) else want
                apart = float((want - got).abs().max()) / max(float(want.abs().max()), 1e-12)
                if not apart <= TOLERANCE:
                    raise SparsebitError(
                        f"{_where(node)}: the pruned model differs from the masked one by {apart:.2g} of the largest "
                        f"value; its channel rule is wrong"
                    )


def _where(node: fx.Node) -> str:
    return str(node.meta.get("path") or node.name)


def _tensor(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), name)
    return found


def _set_module(model: nn.Module, path: str, new: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, new)
