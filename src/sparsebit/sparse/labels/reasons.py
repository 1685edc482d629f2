"""Reasons for the report: why a layer without labels is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.graph.islands import Whole
from sparsebit.graph.ops import op_of
from sparsebit.graph.simplify.weighted_forms import FORMS, Matmul
from sparsebit.sparse.labels.labels import FIXED

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk


def without_rule(walk: Walk, node: fx.Node) -> str:
    """The reason why no channel rule handled a node."""
    module = None
    if node.op == "call_module":
        module = walk.module(node)
    island = walk.gm.meta.get("islands", {}).get("" if isinstance(module, Whole) else str(node.target))
    if module is not None and island is not None:
        return f"was not traced and runs as it is: {island.error}" + f" ({island.line})" * bool(island.line)
    if hasattr(module, "parametrizations") or (module is None and has_weights(walk, node)):
        return "its weight is computed (a parametrization has remove_parametrizations for that)"
    if isinstance(node.target, type) and all(user.op == "output" for user in node.users):
        return "is an output of the model"
    if module is None:
        what = node.target
    else:
        what = type(module).__name__
    name = getattr(what, "__name__", what)
    if not any(isinstance(v, Tensor) for v in pytree.tree_leaves(walk.values[node])):
        return f"no rule looks into what {name} makes of it"
    return f"no rule for {name} called like this"


def has_weights(walk: Walk, node: fx.Node) -> bool:
    """Does it make channels, whatever its input is?"""
    if node.op == "call_module":
        return any(True for _ in walk.module(node).parameters())
    form = FORMS.get(op_of(node, walk.gm))
    return form is not None and not isinstance(form, Matmul) and form.bind(node) is not None


def note_undivided(walk: Walk) -> None:
    """Layers whose channels all depend on each other. One of them must be kept, so all are."""
    for classes, may_vanish in zip(walk.dimensions(), walk.may_vanish()):
        root = int(classes[0])
        for part in walk.slices.values() if len(classes) == 1 and not may_vanish else ():
            n = int((walk.labels.roots(part.labels) == root).sum())
            if part.produces and n > 1 and root != FIXED:
                owner = part.path.rpartition(".")[0]
                why = f"{walk.labels.met_at(root)}: the {n} channels of {walk.paths.get(owner, owner)} go together"
                walk.labels.why_fixed.setdefault(root, why)
