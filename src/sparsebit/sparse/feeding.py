"""Show batches to sparsers: forwards, and backwards for those that look at gradients. Nothing but sums is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import CalibrationError
from sparsebit.graph.feeding import Call, as_call, as_iterable, signature_of, to_device, tracked
from sparsebit.sparse.refit import Moments


def calls(smodel: Any, batches: Any, progress: bool | None = None) -> Iterator[Call]:
    """The arguments of every batch, on the model's device."""
    for batch in tracked(as_iterable(batches), progress, "pruning"):
        yield _call(smodel, batch)


def _call(smodel: Any, batch: Any) -> Call:
    signature = signature_of(smodel)
    args, kwargs = as_call(batch, signature)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CalibrationError(
            f"batches: do not fit forward{signature}: {error}; give inputs, (inputs, target), a dict of keyword "
            f"arguments, or (that dict, target)"
        ) from None
    return to_device(args, smodel.device), to_device(kwargs, smodel.device)


def show(smodel: Any, oprs: dict[str, Any], batches: Any, loss: Any, progress: bool | None) -> None:
    """`batches` are inputs, or (inputs, target); `loss(output, target)` defaults to cross entropy with class labels."""
    gradients = any(opr.sparser.NEEDS == "gradients" for opr in oprs.values())
    if smodel.cfg.sparser.refit and smodel.cfg.sparser.type == "structured":
        for opr in oprs.values():
            opr.moments = Moments() if Moments.wanted(opr) else None
    hooks = [opr.register_forward_hook(_see) for opr in oprs.values()]
    was_training, wanted = smodel.training, {p: p.requires_grad for p in smodel.model.parameters()}
    smodel.eval()
    count = 0
    try:
        for p in wanted:
            p.requires_grad_(gradients or wanted[p])
        with torch.set_grad_enabled(gradients):
            for batch in tracked(as_iterable(batches), progress, "pruning"):
                _one(smodel, oprs, batch, loss, gradients)
                count += 1
    finally:
        for hook in hooks:
            hook.remove()
        for p, grad in wanted.items():
            p.requires_grad_(grad)
            p.grad = None
        smodel.train(was_training)
    if not count:
        raise CalibrationError("no data: `batches` is empty; a few dozen samples are enough")


def _see(opr: Any, inputs: tuple[Any, ...], output: Any) -> None:
    opr.sparser.see(opr, inputs, output)
    if opr.moments is not None and inputs:
        opr.moments.add(opr, inputs[0])


def _one(smodel: Any, oprs: dict[str, Any], batch: Any, loss: Any, gradients: bool) -> None:
    args, kwargs = _call(smodel, batch)
    output = smodel(*args, **kwargs)
    if not gradients:
        return
    for p in smodel.model.parameters():
        p.grad = None
    target = to_device(_target(batch, len(args) or 1), smodel.device)
    _loss(output, target, loss).backward()
    for opr in oprs.values():
        opr.sparser.see_gradients(opr)


def _target(batch: Any, used: int) -> Any:
    """What is left of (x, y) behind the inputs."""
    if isinstance(batch, Mapping) or not isinstance(batch, (tuple, list)):
        return None
    rest = batch[used:]
    return rest[0] if len(rest) == 1 else rest or None


def _loss(output: Any, target: Any, loss: Any) -> Tensor:
    if loss is not None:
        value: Tensor = loss(output, target)
        return value
    if isinstance(output, Tensor) and isinstance(target, Tensor) and not target.is_floating_point():
        return F.cross_entropy(output, target)
    raise CalibrationError(
        "this sparser looks at gradients: give batches of (inputs, class labels), or loss=lambda output, target: ..."
    )
