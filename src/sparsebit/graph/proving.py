"""The graph against the model it was traced from: on the example, and on batches of other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError
from sparsebit.graph.decorated import Shown
from sparsebit.graph.feeding import own_call
from sparsebit.graph.inputs import as_decided, unchecked
from sparsebit.graph.islands import Island, island
from sparsebit.graph.training import evaluating


@torch.no_grad()
def disagreement(gm: fx.GraphModule, model: nn.Module, example: Shown | None) -> Island | None:
    """The graph's output against the model's, on the example."""
    if example is None:
        return None
    with evaluating(model), evaluating(gm):
        try:
            expected = _run(model, example)
        except Exception as error:
            raise TraceError(
                f"the model does not run on the example: {type(error).__name__}: {error}"
            ) from error
        try:
            wrong = not same_outputs(_run(gm, example), expected)
        except Exception as error:
            return island("", error)
        if wrong and same_outputs(
            _run(model, example), expected
        ):  # a model that differs from itself proves nothing
            return Island("", "the traced graph computes another output than the model", "")
    return None


@torch.no_grad()
def relax(gm: fx.GraphModule, model: nn.Module, example: Shown | None) -> None:
    """Drop checks of sizes that batches of another size fail, where the graph computes for them what the model does:
    `if batch != ids.shape[0]: ids = ids.expand(batch, -1)`."""
    checks = {str(i): n for i, n in enumerate(n for n in gm.graph.nodes if n.target is as_decided)}
    if not checks or example is None:
        return
    lines = {name: node.args[0] for name, node in checks.items()}
    idle, needed = set[str](), set[str]()
    _name(gm, checks, dict(zip(checks, checks)))  # several are on one line
    with evaluating(model), evaluating(gm):
        for call in _other_batches(example):
            try:
                expected = _run(model, call)
            except Exception:  # a size that the model does not take
                continue
            with unchecked() as failed:
                try:
                    same = same_outputs(_run(gm, call), expected)
                except Exception:  # where the model runs, the graph does not: the check is needed
                    same = False
            (idle if same else needed).update(failed)
    for name in idle - needed:
        gm.graph.erase_node(checks.pop(name))
    _name(gm, checks, lines)


def _name(gm: fx.GraphModule, checks: dict[str, fx.Node], names: Mapping[str, Any]) -> None:
    for name, node in checks.items():
        node.update_arg(0, names[name])
    gm.recompile()


def _other_batches(example: Shown) -> Iterator[Shown]:
    """Of one, two and one more; what counts as the batch is the first axis of the first tensor."""
    tensors = [t for t in pytree.tree_leaves(example) if isinstance(t, Tensor) and t.dim()]
    size = len(tensors[0]) if tensors else 0
    for other in sorted({1, 2, size + 1} - {size}) if size else ():
        rows = torch.arange(other) % size
        of_batch = lambda t, rows=rows: t[rows.to(t.device)] if t.dim() and len(t) == size else t
        yield pytree.tree_map_only(Tensor, of_batch, example)


def _run(model: nn.Module, example: Shown) -> list[Any]:
    args, kwargs = own_call(*example)
    return pytree.tree_leaves(model(*args, **kwargs))


def same_outputs(a: list[Any], b: list[Any]) -> bool:
    """Are the leaves of two answers equal, up to the rounding of another order of additions?"""
    return len(a) == len(b) and all(map(_close, a, b))


def _close(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    is_number = y.is_floating_point() and y.numel() > 0
    largest = (
        float(y.nan_to_num(0, 0, 0).abs().max()) if is_number else 0.0
    )  # an infinity would allow everything
    return torch.allclose(x, y, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)
