"""prune(): SparseModel in one call. It checks the arguments, chooses channels, cuts them, and returns an
ordinary module. prune_blocks() removes whole blocks first."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
BUDGETS = ("macs", "params", "latency")


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
    config: Any = None,
    progress: bool | None = None,
    **blocks: Any,
) -> nn.Module:
    """A smaller copy of `model`, checked on `example`: the channels that matter least are removed.

    ratio     the share of channels that is removed (0.5 by default), or macs, params, latency: the share of
              multiplications, parameters, or time on this machine that remains.
    sparser   the criterion: l1norm (the default), l2norm, fpgm, lamp, slimming, random; with data: hrank,
              wanda; with data and a loss: taylor, fisher.
    batches   inputs, or (inputs, target), where inputs may be a dict of keyword arguments. Criteria read them, and
              the remaining layers are fitted on them to the original model.
    loss      loss(output, target); cross entropy by default.
    scope     "layer" (the default): the same share of every layer; "global": of all together.
    round_to  layers keep a multiple of this many channels. 1: any number. By default, a layer of 16 or more channels
              keeps a multiple of 8, if the budget allows it.
    heads     of attention: "whole" heads are removed (the default), or the same "dimension" of every head.
    config    a SparseConfig, YAML path or mapping; sparser, scope, round_to, heads and ratio replace its values.
    progress  show bars, for batches and for the search of a budget; None: only on a terminal.

    The result has the model's own class where its code has no sizes, else it is a traced graph. Its `pruning_plan`
    lists the remaining channels of each layer, and applies the same cut to a fresh model.

    merge and depth moved to `sparsebit.sparse.prune_blocks`. They are accepted here for one more release.
    """
    options = {
        "macs": macs,
        "params": params,
        "latency": latency,
        "sparser": sparser,
        "batches": batches,
        "loss": loss,
        "scope": scope,
        "round_to": round_to,
        "heads": heads,
        "config": config,
        "progress": progress,
    }
    if blocks:
        _check_names("prune", blocks, ("merge", "depth"))
        warnings.warn(
            f"prune: {' and '.join(blocks)} moved to sparsebit.sparse.prune_blocks(); the other options are the same",
            DeprecationWarning,
            stacklevel=2,
        )
        return prune_blocks(model, example, ratio, **blocks, **options)
    whole = unwrapped(model)
    return _pruned(whole, whole, example, Request.of(ratio, **options))


def prune_blocks(
    model: nn.Module,
    example: Any,
    ratio: float | None = None,
    *,
    merge: int | str | Sequence[str] = 0,
    depth: int | Sequence[str] = 0,
    **options: Any,
) -> nn.Module:
    """Experimental: remove whole residual blocks, then channels as `sparsebit.prune` does, with its options.

    merge    residual blocks that are merged into the next one, side by side. A number: the blocks whose removal
             changes the output on `batches` least. "auto": every pair of at most 32 channels, which are too narrow for
             kernels once they are halved. Or names.
    depth    branches of residual additions that are replaced by the closest linear layer. A number: the branches that
             matter least on `batches`. Or names.

    A budget (macs, params, latency) is a share of the original model.
    """
    known = inspect.signature(prune).parameters.values()
    _check_names("prune_blocks", options, [p.name for p in known if p.kind is p.KEYWORD_ONLY])
    for name, value in (("merge", merge), ("depth", depth)):
        if not isinstance(value, (int, Sequence)):
            raise ConfigError(f"{name}: expected how many, or a list of names, got {value!r}")
        if isinstance(value, int) and value < 0:
            raise ConfigError(f"{name}: must be at least 0, got {value}")
    request = Request.of(ratio, **options)
    whole = unwrapped(model)
    shorter, done = shallower(whole, example, merge, depth, request.batches, request.progress)
    budget = _of_smaller(request.budget, whole, shorter, example)
    small = _pruned(shorter, whole, example, replace(request, budget=budget))
    # a model with single weights pruned has no plan
    vars(getattr(small, "pruning_plan", Plan())).update(done)
    return small


@dataclass(frozen=True)
class Request:
    """The checked options of one call."""

    config: SparseConfig
    budget: dict[str, float]  # macs, params or latency: the share that remains
    batches: Any = None
    loss: Any = None
    progress: bool | None = None

    @classmethod
    def of(cls, ratio: Any, **options: Any) -> Request:
        budget = _budget(ratio, {name: options.get(name) for name in BUDGETS})
        config = options.get("config")
        round_to = options.get("round_to")
        if round_to is not None and (not isinstance(round_to, Integral) or round_to < 1):
            raise ConfigError(f"round_to: must be at least 1, a whole number, got {round_to!r}")
        if round_to is None and config is None:
            round_to = AUTO
        given = {
            "STRATEGY": options.get("sparser"),
            "SCOPE": options.get("scope"),
            "ROUND_TO": round_to,
            "HEADS": options.get("heads"),
            "RATIO": ratio,
        }
        given = {key: value for key, value in given.items() if value is not None}
        settings = _settings(config, given, bool(budget))
        return cls(settings, budget, options.get("batches"), options.get("loss"), options.get("progress"))


def _check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = set(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _pruned(model: nn.Module, whole: nn.Module, example: Any, request: Request) -> nn.Module:
    """`model` without the channels of the request; its layers are fitted to the outputs of `whole`."""
    smodel = SparseModel(model, request.config, example, share=False)
    if request.batches is not None:
        smodel.calibrate(request.batches, request.loss, request.progress)
    smodel.calc_params(**request.budget, progress=request.progress)
    if request.batches is not None and smodel.cfg.sparser.refit:
        _fit(smodel, whole, request)
    return smodel.compact()


def _fit(smodel: SparseModel, whole: nn.Module, request: Request) -> None:
    if isinstance(request.batches, Iterator):
        log.warning("batches: is a generator and empty now, so layers are not refit; pass a list or a loader")
        return
    smodel.tune_batchnorm(request.batches, request.progress)
    if smodel.cfg.sparser.type == "structured":
        smodel.refit(request.batches, whole, request.progress)


def _of_smaller(
    budget: dict[str, float], model: nn.Module, small: nn.Module, example: Any
) -> dict[str, float]:
    """Turn the budget, a share of the costs of `model`, into a share of the costs of `small`."""
    if small is model:
        return budget
    found = {}
    for name, share in budget.items():
        cost = EXACT[name](walk_of(model, example))
        found[name] = min(1.0, share * cost(model) / cost(small))
    return found


def _budget(ratio: Any, budgets: dict[str, Any]) -> dict[str, float]:
    """The given budget, if any."""
    given = {name: value for name, value in budgets.items() if value is not None}
    asked = dict(given)
    if ratio is not None:
        asked["ratio"] = ratio
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{name}: expected a number such as 0.5, got {value!r}")
    if len(asked) > 1:
        raise ConfigError("prune: give only one of ratio, macs, params and latency")
    if ratio is not None and not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    return given


def _settings(config: Any, given: dict[str, Any], has_budget: bool) -> SparseConfig:
    """The config with the options that were given beside it; by default half of the channels are removed."""
    if config is None:
        config = {"SPARSER": {"RATIO": 0.5}}
    cfg = SparseConfig.load(config)
    if "RATIO" in given and cfg.sparser.pattern:
        raise ConfigError(
            f"ratio: PATTERN {cfg.sparser.pattern} of the config decides how much is removed; leave out one"
        )
    if has_budget and not cfg.sparser.ratio and not cfg.sparser.specific:
        given = {**given, "RATIO": 0.5}  # the budget decides; the ratio only has to be above zero
    changes: list[Any] = []
    for key, value in given.items():
        changes += [f"SPARSER.{key}", value]
    return cfg.override(*changes)
