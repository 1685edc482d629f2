"""fold_constants: a weight that the forward computes from parameters becomes a parameter, computed once.

Examples are `w.t()`, `w * scale` and weight standardisation. Only weights of layers are folded, and no values
that are random, written in place, or much larger than their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import op_of, writes_input
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.rewrite import fresh_name
from sparsebit.graph.simplify.weighted_forms import FORMS, Matmul

_TURNS = frozenset(
    {
        *(getattr, torch.t, torch.permute, torch.transpose, torch.swapaxes, torch.swapdims),
        *(getattr(torch.Tensor, name) for name in ("t", "permute", "transpose", "swapaxes", "swapdims")),
    }
)
MAX_GROWTH = 16  # a folded value may be this many times as large as its sources


@graph_pass("fold_constants", keeps_output=True)
def fold_constants(gm: fx.GraphModule, ctx: Any = None) -> int:
    folder = _Folder(gm)
    return sum(folder.fold_inputs(node) for node in list(gm.graph.nodes) if op_of(node, gm) in FORMS)


def attribute(gm: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor that a get_attr node reads; None for any other node or value."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = _get(gm, str(node.target))
    return found if isinstance(found, Tensor) else None


def transposed(gm: fx.GraphModule, node: Any) -> fx.Node | None:
    """The get_attr node of a 2-D tensor W, if `node` is its transpose: `W.t()`, `W.T`, `W.transpose(0, 1)` ..."""
    if not isinstance(node, fx.Node) or op_of(node, gm) not in _TURNS:
        return None
    (source,) = node.all_input_nodes or (node,)
    weight = attribute(gm, source)
    if weight is None or weight.dim() != 2:
        return None
    turned = _run(node, {str(source.target): weight.detach()}, {})
    same_memory = isinstance(turned, Tensor) and turned.data_ptr() == weight.data_ptr()
    if same_memory and turned.stride() == weight.stride()[::-1]:
        return source
    return None


class _Folder:
    """One run of the pass."""

    def __init__(self, gm: fx.GraphModule):
        self.gm = gm
        self.folded: dict[fx.Node, str | None] = {}  # computed weight -> the attribute that holds it now
        self.roots: dict[fx.Node, set[str] | None] = {}  # the sources of a node; None: not constant
        self.written: set[str] = set()  # these are changed by the forward, so they are no constants
        calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
        for node in (n for n in calls if writes_input(n, gm) or n.is_impure()):
            self.written.update(*(self._roots_of(source) or () for source in node.all_input_nodes))
        self.roots.clear()

    def fold_inputs(self, node: fx.Node) -> int:
        """Fold the computed weights of one call, if all of them are constant."""
        form = FORMS[op_of(node, self.gm)]
        values = form.bind(node) or {}
        weights = [values[slot] for slot in form.slots if isinstance(values.get(slot), fx.Node)]
        todo = [w for w in weights if w.op != "get_attr"]
        if isinstance(form, Matmul):
            todo = [w for w in todo if transposed(self.gm, w) is None]  # a Linear holds the parameter itself
        if not todo or any(not self._roots_of(w) for w in weights):
            return 0
        done = 0
        for weight in todo:
            name = self._attribute_for(weight)
            if name is not None:
                with self.gm.graph.inserting_before(node):
                    new = self.gm.graph.get_attr(name)
                new.meta["path"] = self._main_root(weight)
                node.replace_input_with(weight, new)
                done += 1
        return done

    def _roots_of(self, node: fx.Node) -> set[str] | None:
        """The parameters and buffers that `node` is computed from; None if it is not constant."""
        if node not in self.roots:
            self.roots[node] = self._find_roots(node)
        return self.roots[node]

    def _find_roots(self, node: fx.Node) -> set[str] | None:
        if attribute(self.gm, node) is not None:
            if node.target in self.written:
                return None
            return {str(node.target)}
        if node.op not in ("call_function", "call_method") or writes_input(node, self.gm) or node.is_impure():
            return None
        found = [self._roots_of(source) for source in node.all_input_nodes]
        if any(roots is None for roots in found):
            return None
        return set().union(*filter(None, found))

    def _main_root(self, node: fx.Node) -> str:
        """The largest source, which gives the value its name."""
        size = lambda name: _get(self.gm, name).numel()
        return max(sorted(self._roots_of(node) or ()), key=size)

    def _attribute_for(self, node: fx.Node) -> str | None:
        if node not in self.folded:
            value = self._evaluate(node)
            if value is None:
                self.folded[node] = None
            else:
                self.folded[node] = self._store(node, value)
        return self.folded[node]

    def _store(self, node: fx.Node, value: Tensor) -> str:
        name = fresh_name(self.gm, f"{self._main_root(node).replace('.', '_')}_folded")
        if value.is_floating_point():
            trainable = any(_get(self.gm, root).requires_grad for root in self._roots_of(node) or ())
            self.gm.register_parameter(name, nn.Parameter(value, requires_grad=trainable))
        else:
            self.gm.register_buffer(name, value)
        return name

    @torch.no_grad()
    def _evaluate(self, node: fx.Node) -> Tensor | None:
        """The value, computed on copies; None if it is random, has side effects or is too large."""
        roots = {name: _get(self.gm, name).detach().clone() for name in self._roots_of(node) or ()}
        versions = {name: tensor._version for name, tensor in roots.items()}
        generators = _random_states(roots.values())
        value = _run(node, roots, {})
        if not isinstance(value, Tensor) or any(roots[n]._version != v for n, v in versions.items()):
            return None
        if any(not torch.equal(a, b) for a, b in zip(generators, _random_states(roots.values()))):
            return None
        size = sum(tensor.numel() for tensor in roots.values())
        if value.numel() <= MAX_GROWTH * size:
            return value.clone()
        return None


def _get(gm: fx.GraphModule, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(gm.get_submodule(path), last)


def _run(node: fx.Node, roots: dict[str, Tensor], done: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return roots[str(node.target)]
    if node not in done:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _run(n, roots, done))
        if isinstance(node.target, str):
            call: Callable[..., Any] = getattr(torch.Tensor, node.target)
        else:
            call = node.target
        done[node] = call(*args, **kwargs)
    return done[node]


def _random_states(tensors: Iterable[Tensor]) -> list[Tensor]:
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ())]
