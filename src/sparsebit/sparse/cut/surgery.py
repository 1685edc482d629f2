"""Cut: remove positions from parameters, and adjust the sizes in the graph.

`masked` keeps every shape and writes zeros; `compact` removes the positions. Both compute the same. Before a
compact model is returned, both are compared node by node.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import SparsebitError
from sparsebit.graph.rewrite import remove_dead_code
from sparsebit.graph.run.calls import Call, device_of
from sparsebit.graph.run.compare import Tolerance, in_double, share_apart
from sparsebit.graph.run.interpreter import Runner, values_of
from sparsebit.graph.trace.guards import as_decided
from sparsebit.sparse.cut.sizes import rewrite
from sparsebit.sparse.labels.walk import Walk, tensor_at
from sparsebit.sparse.modules import sparse_module
from sparsebit.sparse.modules.statistics import as_statistic


class Cut:
    """`walk.gm` without the classes `dropped`."""

    def __init__(self, walk: Walk, dropped: Tensor):
        self.walk = walk
        self.dropped = dropped
        self._stays = torch.ones(len(walk.labels), dtype=torch.bool)
        self._stays[dropped] = False

    def keeps(self, labels: Tensor) -> Tensor:
        """Which of `labels` are kept."""
        return self._stays[self.walk.labels.roots(labels)]

    def axes(self, labels: Tensor) -> dict[int, Tensor]:
        """For each axis that loses positions, which positions are kept."""
        found = {}
        for axis in self.walk.labels.varies(labels):
            kept = self.keeps(labels.movedim(axis, 0).reshape(labels.shape[axis], -1)[:, 0])
            if not bool(kept.all()):
                found[axis] = kept
        return found

    def shape(self, labels: Tensor) -> list[int]:
        lost = self.axes(labels)
        found: list[int] = []
        for d, n in enumerate(labels.shape):
            found.append(int(lost[d].sum()) if d in lost else n)
        return found

    def of_value(self, value: Tensor, labels: Tensor) -> Tensor:
        """The kept part of a value."""
        for axis, kept in self.axes(labels).items():
            value = value.index_select(axis, kept.nonzero().flatten().to(value.device))
        return value

    def rule(self, node: fx.Node) -> str:
        """The rule for the channels of a node, for messages."""
        return f"its channel rule ({self.walk.rules.get(node, 'none')})"

    # -- the two models ------------------------------------------------------------------------------
    def masked(self) -> fx.GraphModule:
        """A graph with the same shapes and zeros at the removed positions. A layer norm takes its statistics
        from kept channels."""
        gm = copy.deepcopy(self.walk.gm)
        for cut in self.walk.slices.values():
            tensor = tensor_at(gm, cut.path)
            kept = self.keeps(cut.labels).to(tensor.device)
            line = []
            for d in range(tensor.dim()):
                line.append(-1 if d == cut.axis else 1)
            if cut.path not in self.walk.divisors and not cut.path.endswith(("running_mean", "running_var")):
                with torch.no_grad():
                    tensor.mul_(kept.view(line))
        for path, labels in self.walk.normed.items():
            if not bool(self.keeps(labels).all()):
                norm: Any = sparse_module(gm.get_submodule(path))
                norm.kept = self.keeps(labels).to(device_of(gm))
                _set_module(gm, path, norm)
        for node in gm.graph.nodes:
            if node.name in self.walk.statistics:
                as_statistic(gm, node).set(self.keeps(self.walk.statistics[node.name]))
        gm.recompile()
        return gm

    def compact(self) -> fx.GraphModule:
        """A smaller graph."""
        gm = copy.deepcopy(self.walk.gm)
        self.cut_parameters(gm)
        rewrite(self, gm)
        checked = _Checked(self, gm)
        checked.run_on(self.walk.example)
        for node in checked.settled:
            gm.graph.erase_node(node)
        remove_dead_code(gm)  # sizes that have no reader any more
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
            old = tensor_at(model, self._path(model, cut.path))
            source = new.get(id(old), old)
            index = kept.nonzero().flatten().to(source.device)
            sliced = source.detach().index_select(cut.axis, index).clone()
            if isinstance(old, nn.Parameter):
                new[id(old)] = nn.Parameter(sliced, old.requires_grad)
            else:
                new[id(old)] = sliced
        for module in model.modules():  # several modules may share a parameter
            for names in (module._parameters, module._buffers):
                for name, value in list(names.items()):
                    if value is not None and id(value) in new:
                        # recurrent layers also keep a list of their parameters
                        setattr(module, name, new[id(value)])
        for path, attribute, labels in self.walk.sizes:
            left = int(self.keeps(labels).sum())
            module = model.get_submodule(self._path(model, f"{path}.").removesuffix("."))
            setattr(module, attribute, (left,) if attribute == "normalized_shape" else left)

    def _path(self, model: nn.Module, path: str) -> str:
        """The path of a parameter in `model`, where `F.linear` is not a module as in the graph."""
        owner, _, name = path.rpartition(".")
        try:
            model.get_submodule(owner)
        except AttributeError:
            return f"{self.walk.paths.get(owner, owner)}.{name}"
        return path


class _Checked(Runner):
    """Runs the cut graph on the example. Every value must have the shape that its labels predict."""

    def __init__(self, cut: Cut, gm: fx.GraphModule):
        super().__init__(gm)
        self.cut = cut
        self.old = {node.name: node for node in cut.walk.gm.graph.nodes}
        # conditions on the number of channels, which the cut changed; conditions on inputs stay
        self.settled: list[fx.Node] = []

    def run_node(self, n: fx.Node) -> Any:
        old = self.old.get(n.name)
        if n.target is as_decided:
            _, outcome, wanted = self.fetch_args_kwargs_from_env(n)[0]
            self.settled += [n] if bool(outcome) is not wanted else []
            return None
        if old is None:
            return super().run_node(n)  # arithmetic of sizes
        labels = self.cut.walk.of[old]
        try:
            value = super().run_node(n)
        except Exception as error:  # any op of the graph may refuse the new shapes
            raise SparsebitError(
                f"{_where(old)}: does not run on the pruned shapes: {error}; {self.cut.rule(old)}"
            ) from error
        was = pytree.tree_leaves(self.cut.walk.values[old])
        if _nan(pytree.tree_leaves(value)) and not _nan(was):
            raise SparsebitError(
                f"{_where(old)}: is NaN after pruning, such as the deviation of a single channel; keep more channels"
            )
        for got, have in zip(pytree.tree_leaves(value), pytree.tree_leaves(labels)):
            if (
                isinstance(got, Tensor)
                and isinstance(have, Tensor)
                and have.numel()  # an empty value has no labels
                and list(got.shape) != self.cut.shape(have)
            ):
                raise SparsebitError(
                    f"{_where(old)}: has the shape {list(got.shape)} after pruning, where {self.cut.shape(have)} "
                    f"was expected; {self.cut.rule(old)}, or a size that it takes, is not adjusted to the channels"
                )
        return value


def _nan(values: list[Any]) -> bool:
    return any(isinstance(v, Tensor) and v.is_floating_point() and bool(v.isnan().any()) for v in values)


def check_equal(cut: Cut, masked: fx.GraphModule, compact: fx.GraphModule) -> None:
    """Raise unless both models compute the same. The error names the first node that differs."""
    wrong = _difference(cut, masked.eval(), compact.eval(), cut.walk.example)
    if wrong is not None:  # a deep network makes rounding errors large; in float64 they disappear
        big = copy.deepcopy(masked).double()
        small = copy.deepcopy(compact).double()
        with contextlib.suppress(RuntimeError):  # the user's code asks for float32
            wrong = _difference(cut, big, small, in_double(cut.walk.example))
    if wrong is not None:
        node, apart = wrong
        raise SparsebitError(
            f"{_where(node)}: the pruned model differs from the masked one by {apart:.2g} of the largest value; "
            f"{cut.rule(node)} is wrong"
        )


def _difference(
    cut: Cut, masked: fx.GraphModule, compact: fx.GraphModule, example: Call
) -> tuple[fx.Node, float] | None:
    """The first node whose values differ, and the difference."""
    wanted = values_of(masked, example)
    found = values_of(compact, example)
    for node in cut.walk.gm.graph.nodes:
        if node.op == "get_attr" or node.name not in found:
            continue
        want_leaves = pytree.tree_leaves(wanted[node.name])
        labels_of: list[Any] = [None] * len(want_leaves)  # an output keeps all of its positions
        if node.op != "output":
            labels_of = pytree.tree_leaves(cut.walk.of[node])
        for want, got, labels in zip(want_leaves, pytree.tree_leaves(found[node.name]), labels_of):
            if not isinstance(want, Tensor) or not want.is_floating_point():
                continue
            if isinstance(labels, Tensor):
                want = cut.of_value(want, labels)
            apart = share_apart(got, want)
            if apart > Tolerance.EXACT.value:
                return node, apart
    return None


def _where(node: fx.Node) -> str:
    return str(node.meta.get("path") or node.name)


def _set_module(model: nn.Module, path: str, new: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, new)
