"""Batch-norm tuning: statistics that fit the quantized network (Hubara et al., AdaQuant, 2020, section 4).

Rounding moves mean and variance of the inputs of a BatchNorm, which still uses those of the float network. Here every
batch runs twice, in float and quantized, and the running statistics move by the difference:

    mean' = mean + (mean_q - mean_f)        var' = var * var_q / var_f

Not by re-estimation, because a few hundred images never have the statistics of an augmented training set (ResNet-20 in
float: 91.7 -> 88.8 % top-1 by re-estimating on 5,000 of its training images). Then the norms are folded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.errors import CalibrationError
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.modes import evaluating
from sparsebit.quantization.calibration.batchnorm_folding import fold, override_folded
from sparsebit.quantization.modules import quant_mode


@contextmanager
def batchnorm_tuning(qmodel: Any) -> Iterator[None]:
    """Run batches through `qmodel` inside the block; at its end the batch norms are tuned and folded.

    The model must be calibrated and built with SCHEDULE.BN_TUNING: true, which keeps the norms. Inside the block
    weights and activations are quantized and the model is in eval mode; both come back afterwards. If the block
    raises, nothing has changed.
    """
    gm: fx.GraphModule = qmodel.model
    norms = [m for m in gm.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        raise CalibrationError(
            "batchnorm_tuning(): the model has no BatchNorm with running statistics; if they were folded, build the "
            "QuantModel with SCHEDULE.BN_TUNING: true"
        )
    tuned = [_Tuned(norm) for norm in norms]
    try:
        with evaluating(qmodel), quant_mode(gm, w=True, a=True), _listening(gm, tuned):
            yield
        if not any(t.count for t in tuned):
            raise CalibrationError("batchnorm_tuning(): no batch was run; call qmodel(x) inside the block")
    except BaseException:  # also on Ctrl-C
        for t in tuned:
            t.reset()
        raise
    fold(gm)
    override_folded(qmodel)


class _Tuned:
    """One BatchNorm: its statistics in the float network, and how far quantization moves them."""

    def __init__(self, norm: _BatchNorm):
        self.norm = norm
        self.mean = _alone(norm.running_mean)
        self.var = _alone(norm.running_var)
        self.shift, self.float_var, self.quant_var = (torch.zeros_like(self.var) for _ in range(3))
        self.count = 0
        self.waiting: deque[tuple[Tensor, Tensor]] = deque()  # of the float pass; two if it is called twice

    def see_float(self, x: Tensor) -> None:
        self.reset()
        self.waiting.append(_statistics(x))

    def see_quantized(self, x: Tensor) -> None:
        """Normalise this batch already with the statistics that all batches so far ask for."""
        (mean_f, var_f), (mean_q, var_q) = self.waiting.popleft(), _statistics(x)
        self.count += 1
        self.shift += mean_q - mean_f
        self.float_var += var_f
        self.quant_var += var_q
        eps = self.norm.eps
        ratio = (self.quant_var / self.count + eps) / (self.float_var / self.count + eps)
        self._set(self.mean + self.shift / self.count, ((self.var + eps) * ratio - eps).clamp(min=0))

    def reset(self) -> None:
        self._set(self.mean, self.var)

    @torch.no_grad()
    def _set(self, mean: Tensor, var: Tensor) -> None:
        for old, new in ((self.norm.running_mean, mean), (self.norm.running_var, var)):
            assert old is not None
            old.copy_(new)


def _alone(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.detach().float().clone()


@torch.no_grad()
def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    channels = x.float().transpose(0, 1).flatten(1)
    return channels.mean(1), channels.var(1, unbiased=False)


@contextmanager
def _listening(gm: fx.GraphModule, tuned: list[_Tuned]) -> Iterator[None]:
    """Every forward of `gm` runs in float first; its norms see both."""
    in_float = False

    @torch.no_grad()
    def run_in_float(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal in_float
        if in_float:
            return
        in_float = True
        try:
            with quant_mode(gm):
                Call(args, kwargs).run(gm)
        finally:
            in_float = False

    def seen_by(t: _Tuned) -> Callable[..., None]:
        return lambda module, args: (t.see_float if in_float else t.see_quantized)(args[0])

    with ExitStack() as handles:
        handles.callback(gm.register_forward_pre_hook(run_in_float, with_kwargs=True).remove)
        for t in tuned:
            handles.callback(t.norm.register_forward_pre_hook(seen_by(t)).remove)
        yield
