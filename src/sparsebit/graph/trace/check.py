"""Compare a graph with the model that it was traced from: on the example, and on batches of other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError
from sparsebit.graph.islands import Island, island
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.compare import difference
from sparsebit.graph.run.modes import evaluating
from sparsebit.graph.trace.guards import as_decided, unchecked


@torch.no_grad()
def disagreement(gm: fx.GraphModule, model: nn.Module, example: Call | None) -> Island | None:
    """The difference between the outputs of graph and model on the example, if any."""
    if example is None:
        return None
    with evaluating(model), evaluating(gm):
        try:
            expected = _run(model, example)
        except Exception as error:  # the user's forward may raise anything
            raise TraceError(
                f"the model does not run on the example: {type(error).__name__}: {error}"
            ) from error
        try:
            wrong = difference(_run(gm, example), expected)
        except Exception as error:  # the graph runs the user's code
            return island("", error)
        if wrong is None or difference(_run(model, example), expected):
            return None  # a model that differs from itself proves nothing
        return Island("", f"the traced graph computes another output than the model: {wrong}", "")


@torch.no_grad()
def relax(gm: fx.GraphModule, model: nn.Module, example: Call | None) -> None:
    """Erase checks of sizes that fail on another batch size for which the graph and the model agree.

    `if batch != ids.shape[0]: ids = ids.expand(batch, -1)` makes such a check.
    """
    checks = {}
    for i, n in enumerate(n for n in gm.graph.nodes if n.target is as_decided):
        checks[str(i)] = n
    if not checks or example is None:
        return
    lines = {name: node.args[0] for name, node in checks.items()}
    idle = set[str]()
    needed = set[str]()
    _name(gm, checks, dict(zip(checks, checks)))  # several checks may stand on one line
    with evaluating(model), evaluating(gm):
        for call in _other_batches(example):
            try:
                expected = _run(model, call)
            except Exception:  # a size that the model does not take
                continue
            with unchecked() as failed:
                try:
                    same = difference(_run(gm, call), expected) is None
                except Exception:  # the model runs and the graph does not: the check is needed
                    same = False
            (idle if same else needed).update(failed)
    for name in idle - needed:
        gm.graph.erase_node(checks.pop(name))
    _name(gm, checks, lines)


def _name(gm: fx.GraphModule, checks: dict[str, fx.Node], names: Mapping[str, Any]) -> None:
    for name, node in checks.items():
        node.update_arg(0, names[name])
    gm.recompile()


def _other_batches(example: Call) -> Iterator[Call]:
    """The example with a batch of one, of two and of one more. The batch is the first axis of the first
    tensor."""
    tensors = [t for t in pytree.tree_leaves(example) if isinstance(t, Tensor) and t.dim()]
    size = len(tensors[0]) if tensors else 0
    for other in sorted({1, 2, size + 1} - {size}) if size else ():
        rows = torch.arange(other) % size
        of_batch = lambda t, rows=rows: t[rows.to(t.device)] if t.dim() and len(t) == size else t
        yield example.map(of_batch)


def _run(model: nn.Module, example: Call) -> list[Any]:
    return pytree.tree_leaves(example.run(model))
