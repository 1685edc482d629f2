"""prune(): SparseModel in one call. It checks the arguments, chooses channels, cuts them, and returns an
ordinary module."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any

from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.graph.trace import unwrapped
from sparsebit.sparse.choose.allocate import AUTO
from sparsebit.sparse.choose.costs import EXACT
from sparsebit.sparse.depth.shallower import shallower
from sparsebit.sparse.labels.walk import walk_of
from sparsebit.sparse.plan import Plan
from sparsebit.sparse.sparse_config import SparseConfig
from sparsebit.sparse.sparse_model import SparseModel

log = logging.getLogger("sparsebit")


def _of_smaller(
    budget: dict[str, float], model: nn.Module, small: nn.Module, example: Any
) -> dict[str, float]:
    """Turn the budget, a share of the costs of `model`, into a share of the costs of `small`."""
    for name, share in budget.items() if small is not model else ():
        cost = EXACT[name](walk_of(model, example))
        budget = {name: min(1.0, share * cost(model) / cost(small))}
    return budget


def _how_much(ratio: Any, budgets: dict[str, Any]) -> dict[str, float]:
    """The given budget, if any."""
    given = {name: value for name, value in budgets.items() if value is not None}
    asked = {**given, **({} if ratio is None else {"ratio": ratio})}
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{name}: expected a number such as 0.5, got {value!r}")
    if len(asked) > 1:
        raise ConfigError("prune: give only one of ratio, macs, params and latency")
    if ratio is not None and not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    return given


def _settings(config: Any, said: dict[str, Any], budget: bool) -> SparseConfig:
    """The config with the options that were given beside it; by default half of the channels are removed."""
    cfg = SparseConfig.load({"SPARSER": {"RATIO": 0.5}} if config is None else config)
    if "RATIO" in said and cfg.sparser.pattern:
        raise ConfigError(
            f"ratio: PATTERN {cfg.sparser.pattern} of the config decides how much is removed; leave out one"
        )
    if budget and not cfg.sparser.ratio and not cfg.sparser.specific:
        said = {**said, "RATIO": 0.5}  # the budget decides; the ratio only has to be above zero
    return cfg.override(*(item for key, value in said.items() for item in (f"SPARSER.{key}", value)))


def prune(
    model: nn.Module,
    example: Any,
    ratio: float | None = None,
    *,
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    sparser: str | None = None,
    batches: Any = None,
    loss: Any = None,
    scope: str | None = None,
    round_to: int | None = None,
    heads: str | None = None,
    merge: int | str | Sequence[str] = 0,
    depth: int | Sequence[str] = 0,
    config: Any = None,
    progress: bool | None = None,
) -> nn.Module:
    """See sparsebit.prune."""
    given = _how_much(ratio, {"macs": macs, "params": params, "latency": latency})
    for name, value in (("merge", merge), ("depth", depth)):
        if not isinstance(value, (int, Sequence)):
            raise ConfigError(f"{name}: expected how many, or a list of names, got {value!r}")
        if isinstance(value, int) and value < 0:
            raise ConfigError(f"{name}: must be at least 0, got {value}")
    if round_to is not None and (not isinstance(round_to, Integral) or round_to < 1):
        raise ConfigError(f"round_to: must be at least 1, a whole number, got {round_to!r}")
    if round_to is None and config is None:
        round_to = AUTO
    said = {"STRATEGY": sparser, "SCOPE": scope, "ROUND_TO": round_to, "HEADS": heads, "RATIO": ratio}
    cfg = _settings(config, {k: v for k, v in said.items() if v is not None}, bool(given))
    whole = model = unwrapped(model)
    model, done = shallower(model, example, merge, depth, batches, progress)
    given = _of_smaller(given, whole, model, example)
    smodel = SparseModel(model, cfg, example, share=False)
    if batches is not None:
        smodel.calibrate(batches, loss, progress)
    smodel.calc_params(**given, progress=progress)
    if batches is not None and smodel.cfg.sparser.refit:
        if isinstance(batches, Iterator):
            log.warning(
                "batches: is a generator and empty now, so layers are not refit; pass a list or a loader"
            )
        else:
            smodel.tune_batchnorm(batches, progress)
            if cfg.sparser.type == "structured":
                smodel.refit(batches, whole, progress)
    small = smodel.compact()
    # a model with single weights pruned has no plan
    vars(getattr(small, "pruning_plan", Plan())).update(done)
    return small
