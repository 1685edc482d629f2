"""Show batches to sparsers: forwards, and backwards for sparsers that need gradients. Only sums are stored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import CalibrationError, ConfigError, SparsebitError
from sparsebit.graph.run.batches import Batches, in_short
from sparsebit.graph.run.calls import to_device
from sparsebit.graph.run.modes import evaluating
from sparsebit.sparse.choose.moments import FEW, Moments

log = logging.getLogger("sparsebit")


def show(smodel: Any, oprs: dict[str, Any], batches: Any, loss: Any, progress: bool | None) -> None:
    """`batches` are inputs, or (inputs, target). `loss(output, target)` defaults to cross entropy with class
    labels."""
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss: expected a function of (output, target), got {loss!r}")
    calls = Batches(smodel, batches, progress, "pruning", once=True)
    gradients = any(opr.sparser.NEEDS == "gradients" for opr in oprs.values())
    if smodel.cfg.sparser.refit and smodel.cfg.sparser.type == "structured":
        for opr in oprs.values():
            opr.moments = None
            if Moments.wanted(opr):
                opr.moments = Moments()
    hooks = [opr.register_forward_hook(_see) for opr in oprs.values()]
    before = {p: (p.requires_grad, p.grad) for p in smodel.model.parameters()}  # these belong to the user
    try:
        for p, (trains, _) in before.items():
            p.requires_grad_(gradients or trains)
        with evaluating(smodel), torch.set_grad_enabled(gradients), calls.named():
            for args, kwargs in calls:
                output = smodel(*args, **kwargs)
                if gradients:
                    target = to_device(_target(calls.batch, len(args) or 1), calls.device)
                    _backward(smodel, oprs, _loss(output, target, loss, calls.number))
    finally:
        for hook in hooks:
            hook.remove()
        for p, (trains, grad) in before.items():
            p.requires_grad_(trains)
            p.grad = grad
    fewest = min((opr.moments.rows for opr in oprs.values() if opr.moments and opr.moments.rows), default=FEW)
    if fewest < FEW:
        log.warning(
            "batches: some layers see only %d samples, and weights that are fitted to so few may not suit other data; "
            "pass a few dozen, or set SPARSER.REFIT to false",
            fewest,
        )


def _see(opr: Any, inputs: tuple[Any, ...], output: Any) -> None:
    opr.sparser.see(opr, inputs, output)
    if opr.moments is not None and inputs:
        opr.moments.add(opr, inputs[0])


def _backward(smodel: Any, oprs: dict[str, Any], value: Tensor) -> None:
    for p in smodel.model.parameters():
        p.grad = None
    value.backward()
    for opr in oprs.values():
        opr.sparser.see_gradients(opr)


def _target(batch: Any, used: int) -> Any:
    """The values behind the inputs of a batch: the y of (x, y)."""
    if isinstance(batch, Mapping) or not isinstance(batch, (tuple, list)):
        return None
    rest = batch[used:]
    return rest[0] if len(rest) == 1 else rest or None


def _loss(output: Any, target: Any, loss: Any, number: int) -> Tensor:
    """The value to differentiate: one number that depends on the output."""
    if loss is None:
        labels = isinstance(target, Tensor) and not target.is_floating_point()
        if not (isinstance(output, Tensor) and labels):
            raise CalibrationError(
                "this sparser needs gradients: give batches of (inputs, class labels), or "
                "loss=lambda output, target: ..."
            )
        loss = F.cross_entropy
    try:
        value = loss(output, target)
    except (SparsebitError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the user's loss may raise anything
        name = getattr(loss, "__name__", type(loss).__name__)
        shapes = ", ".join(_shape(x) for x in (output, target))
        raise CalibrationError(
            f"loss: {name}({shapes}) fails on batch {number}: {in_short(error)}; check its target, or pass another loss"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        detached = isinstance(value, Tensor) and value.numel() == 1
        if detached:
            got = "one that is detached"
        else:
            got = _shape(value)
        raise CalibrationError(
            f"loss: must return a tensor of one number that depends on the output, such as a mean, got {got} for "
            f"batch {number}"
        )
    return value


def _shape(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of {list(x.shape)}"
    return f"a {type(x).__name__}"
