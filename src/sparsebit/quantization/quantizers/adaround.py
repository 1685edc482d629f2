"""AdaRound: whether a weight is rounded up or down is learned (Nagel et al., Up or Down?, ICML 2020).

    W~ = s clamp(floor(W / s) + h(V)),  h(V) = clamp(1.2 sigmoid(V) - 0.1, 0, 1),  penalty mean(1 - |2h - 1|^beta)

Before reconstruction (reconstruction/reconstruct.py) it rounds to the nearest code, as `uniform` does. Then `shift`
holds the number of steps between each weight and the nearest code. A checkpoint and an export need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.config import Config
from sparsebit.errors import ConfigError
from sparsebit.numeric import QParams, broadcast, in_groups
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer

# they stretch the sigmoid, so that h reaches 0 and 1
ZETA = 1.1
GAMMA = -0.1
FIXED = 10.0  # |v| of a weight that is decided for good
# between these shares of the steps, more and more weights are decided for good
DECIDE_FROM = 0.3
DECIDE_UNTIL = 0.95
DECIDE_EVERY = 5  # steps

Pair = Annotated[tuple[float, float], Field(strict=False)]


class SoftRounding:
    """The rounding of one weight while it is learned: `v` decides up or down, `gain` changes the length of a step."""

    def __init__(self, weight: Tensor, grid: QParams, qmin: int, qmax: int, axis: int | None):
        self.scale = broadcast(grid.scale.to(weight), weight.dim(), axis)
        zero_point = broadcast(grid.zero_point.to(weight), weight.dim(), axis).round()
        self.low = qmin - zero_point
        self.high = qmax - zero_point
        steps = weight / self.scale
        self.floor = steps.floor()
        rest = (steps - self.floor).clamp(1e-4, 1 - 1e-4)
        self.v = torch.log((rest - GAMMA) / (ZETA - rest)).requires_grad_()
        self.gain = torch.ones_like(self.scale).requires_grad_()

    def up(self) -> Tensor:
        """h(V): how far each weight is rounded up, 0 to 1."""
        return (torch.sigmoid(self.v) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)

    def weight(self) -> Tensor:
        return (self.floor + self.up()).clamp(self.low, self.high) * (self.scale * self.gain)

    def codes(self) -> Tensor:
        """Steps from zero, decided."""
        return (self.floor + (self.v.detach() >= 0)).clamp(self.low, self.high)

    def penalty(self, beta: float) -> Tensor:
        """How undecided the weights are, summed up."""
        return (1 - (2 * self.up() - 1).abs().pow(beta)).sum()

    @torch.no_grad()
    def decide(self, share: float) -> None:
        """Fix that share of the weights, the most decided first: where h is clamped, it has no gradient.

        The others compensate the cost, so that every weight is decided at the end.
        """
        count = round(share * self.v.numel())
        if count:
            least = self.v.abs().flatten().kthvalue(self.v.numel() - count + 1).values
            fixed = torch.where(self.v >= 0, FIXED, -FIXED)
            self.v.copy_(torch.where(self.v.abs() >= least, fixed, self.v))

    @property
    def decided(self) -> bool:
        return bool((self.v.detach().abs() >= FIXED / 2).all())


@register_quantizer
class AdaRoundQuantizer(BaseQuantizer):
    TYPE = "adaround"
    broadcasts = False
    shift: Tensor

    class Params(Config):
        unit: Literal["block", "layer"] = Field("block", description="what is reconstructed as a whole")
        steps: int = Field(500, ge=1, description="gradient steps per block or layer")
        batch_size: int = Field(16, ge=1, description="images per step, fewer where they are large")
        lr: float = Field(0.2, gt=0, description="of Adam, for the choice between up and down")
        beta: Pair = Field((20.0, 2.0), description="exponent of the penalty, at the start and at the end")
        warmup: float = Field(0.2, ge=0, lt=1, description="share of the steps without the penalty")
        round_loss_weight: float = Field(
            1000.0, ge=0, description="weight of the penalty on undecided weights"
        )

    @classmethod
    def check(cls, cfg: Any) -> None:
        if QuantTarget.WEIGHT not in cfg.target:
            raise ConfigError("QUANTIZER.TYPE: adaround is for weights only")

    def __init__(self, config: Any):
        super().__init__(config)
        self.register_buffer("shift", torch.zeros(0, dtype=torch.int8))
        self.soft: SoftRounding | None = None

    @property
    def reconstructed(self) -> bool:
        return self.shift.numel() > 0

    def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        if self.soft is not None:
            return self.soft.weight().reshape(x.shape)
        return super()._forward(self.transform(x), scale, zero_point)

    def transform(self, x: Tensor) -> Tensor:
        """`x` on the grid, each value at the code that was learned for it."""
        if not self.reconstructed:
            return x
        steps, scale = self._nearest(x)
        y = ((steps + self.shift.to(steps)) * scale).reshape(x.shape).to(x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            return x + (y - x).detach()
        return y

    def _nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Steps from zero to the code next to each value (groups as rows), and the length of a step."""
        spec = self.spec
        rows = in_groups(x.detach().float(), self.spec.group)
        scale = broadcast(self.scale.detach().float(), rows.dim(), spec.axis)
        zero = broadcast(self.zero_point.round().float(), rows.dim(), spec.axis)
        return (rows / scale).round().clamp(spec.qmin - zero, spec.qmax - zero), scale

    # -- learning ------------------------------------------------------------------------------------
    def start(self, weight: Tensor) -> SoftRounding:
        """Round softly from now on, starting where nothing is rounded."""
        spec = self.spec
        rows = in_groups(weight.detach().float(), spec.group)
        self.soft = SoftRounding(rows, QParams(self.scale, self.zero_point), spec.qmin, spec.qmax, spec.axis)
        return self.soft

    @torch.no_grad()
    def settle(self, weight: Tensor) -> None:
        """Decide: from now on each weight has the code that was learned for it."""
        soft = self.soft
        if soft is None:
            return
        self._set_qparams(self.scale * soft.gain.reshape(-1).to(self.scale), self.zero_point)
        self.shift = (soft.codes() - self._nearest(weight)[0]).to(torch.int8)

    def forget(self) -> None:
        """Back to the nearest code."""
        self.soft = None
        self.shift = torch.zeros(0, dtype=torch.int8, device=self.scale.device)

    def _set_qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        self.forget()  # the learned rounding belongs to the old grid
        return super()._set_qparams(scale, zero_point)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.setdefault(prefix + "shift", torch.zeros(0, dtype=torch.int8))
        self.soft = None
        self.shift = torch.empty_like(saved, device=self.scale.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


class LinearTempDecay:
    """beta over the steps: `start_beta` while warming up, then in a straight line to `end_beta`."""

    def __init__(
        self, max_steps: int, rel_start_step: float = 0.2, start_beta: float = 20, end_beta: float = 2
    ):
        self.max_steps = max_steps
        self.start_step = rel_start_step * max_steps
        self.start_beta = start_beta
        self.end_beta = end_beta

    def __call__(self, step: int) -> float:
        if step < self.start_step:
            return self.start_beta
        done = (step - self.start_step) / max(self.max_steps - self.start_step, 1)
        return self.end_beta + (self.start_beta - self.end_beta) * max(0.0, 1 - done)


def learn(
    softs: Sequence[SoftRounding],
    groups: list[dict[str, Any]],
    loss_of: Callable[[], Tensor],
    options: AdaRoundQuantizer.Params,
) -> Iterator[float]:
    """Yields the loss after every step. `groups` are parameters for Adam beside the rounding; they calm down.

    With nothing beside the rounding to learn, it stops once every weight is decided.
    """
    beta = LinearTempDecay(options.steps, options.warmup, *options.beta)
    optimizer = torch.optim.Adam([{"params": [s.v for s in softs], "lr": options.lr}, *groups])
    share = options.round_loss_weight / sum(s.v.numel() for s in softs)
    slower = lambda step: 1 - step / options.steps
    calmer = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, *[slower] * len(groups)])
    for step in range(options.steps):
        progress = (step / options.steps - DECIDE_FROM) / (DECIDE_UNTIL - DECIDE_FROM)
        if progress > 0 and step % DECIDE_EVERY == 0:
            for soft in softs:
                soft.decide(min(progress, 1.0) ** 0.5)
            if not groups and all(soft.decided for soft in softs):
                return
        optimizer.zero_grad(set_to_none=True)
        loss = total = loss_of()
        if step >= beta.start_step and share:
            total = loss + share * torch.stack([s.penalty(beta(step)) for s in softs]).sum()
        total.backward()
        optimizer.step()
        calmer.step()
        yield loss.item()


def reconstruct_qlayer(
    layer: Any,
    inputs: Tensor,
    outputs: Tensor,
    batch_size: int = 32,
    max_steps: int = 20000,
    beta_range: tuple[float, float] = (20, 2),
    warmup: float = 0.2,
    p: float = 2.0,
    round_loss_weight: float = 1e-3,
    a_quant: bool = False,
) -> None:
    """Learn the rounding of one layer from its inputs and float outputs; `QuantModel.reconstruct` does whole models."""
    layer.eval()
    layer.set_quant(w_quant=True, a_quant=a_quant)
    weight = layer.weight
    options = AdaRoundQuantizer.Params(
        steps=max_steps,
        beta=(float(beta_range[0]), float(beta_range[1])),
        warmup=warmup,
        round_loss_weight=round_loss_weight * weight.numel(),  # the original's weight is per value
    )

    def loss() -> Tensor:
        rows = torch.randperm(len(inputs))[:batch_size]
        error: Tensor = layer(inputs[rows].to(weight.device)) - outputs[rows].to(weight.device)
        return error.abs().pow(p).sum(1).mean()

    with torch.enable_grad():
        for _ in learn([layer.weight_quantizer.start(weight)], [], loss, options):
            pass
    layer.weight_quantizer.settle(weight)
    layer.set_quant(w_quant=False, a_quant=False)


Quantizer = AdaRoundQuantizer
