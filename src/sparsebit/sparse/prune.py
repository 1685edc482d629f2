"""Walk a model, cut it, and give back an ordinary one; `sparsebit.prune` is SparseModel in one call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from sparsebit.errors import ConfigError, SparsebitError
from sparsebit.graph.inputs import guard_inputs
from sparsebit.graph.islands import Island, as_one_node, warn_of
from sparsebit.graph.trace import Call, LeafTracer, own_copy, trace, unwrapped
from sparsebit.graph.training import set_training, training_flags
from sparsebit.sparse.allocate import AUTO
from sparsebit.sparse.batches import refuse_arrays
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.graph_form import graph_form
from sparsebit.sparse.modules import SMODULE_MAP
from sparsebit.sparse.opened import OPEN
from sparsebit.sparse.plan import Plan
from sparsebit.sparse.sharing import own_memory
from sparsebit.sparse.sparse_config import Heads, SparseConfig

log = logging.getLogger("sparsebit")


def call_of(example: Any) -> Call:
    """`example` is a tensor, a tuple of arguments, a mapping of keyword arguments, or a call with both."""
    refuse_arrays("example", example)
    if isinstance(example, inspect.BoundArguments):
        return example.args, example.kwargs
    if isinstance(example, Mapping):
        return (), dict(example)
    several = isinstance(example, tuple) and not isinstance(example, PackedSequence)
    return (example if several else (example,)), {}


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise SparsebitError(f"model: expected an nn.Module, got {what}; weights alone cannot be pruned")
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise SparsebitError(
            f"model: {type(model).__name__} has no forward(); pass the module that is called"
        )
    if any(hasattr(module, "named_quantizers") for module in model.modules()):
        raise SparsebitError(
            "model: is a QuantModel already; prune the float model first, then quantize that"
        )
    _check_finite(model)


def _check_finite(model: nn.Module) -> None:
    """Of the layers that are masked, every weight; elsewhere -inf may be meant, as in a mask of attention."""
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None or not p.is_floating_point() or p.is_meta or type(p) is not nn.Parameter:
                continue
            bad = int((p.isnan() if type(module) not in SMODULE_MAP else ~p.isfinite()).sum())
            if bad:
                where = f"{path}.{name}".lstrip(".")
                raise SparsebitError(
                    f"{where}: {bad} of {p.numel()} values are NaN or infinite; take another checkpoint"
                )


def traced(model: nn.Module, example: Call | None) -> fx.GraphModule:
    """The graph that is masked and cut. Without an example, torch's own attention blocks stay closed, and whole."""
    gm = guarded(simplified(first_graph(model, example), example))
    own_memory(gm)
    return gm


def first_graph(model: nn.Module, example: Call | None) -> fx.GraphModule:
    """The graph as the forward is written."""
    model = unwrapped(model)
    check_model(model)
    known = lambda op: op in SMODULE_MAP or op in OPEN
    gm = trace(model, LeafTracer(is_known=known, decides=True), example)
    warn_of(gm.meta["islands"])
    gm.meta["unread"] = [*getattr(model, "meta", {}).get("unread", ()), *gm.meta["unread"]]  # of a merged one
    gm.meta["training"] = training_flags(gm) | training_flags(model)
    return gm


def simplified(gm: fx.GraphModule, example: Call | None) -> fx.GraphModule:
    """In the form that channel rules know; what that is, an example must show."""
    if example is None:
        return gm
    known = {key: gm.meta[key] for key in ("fixed", "unread", "training")}
    gm = graph_form(gm.eval(), example)  # running it in training would change the batch norms
    gm.meta.update(known)
    set_training(gm, gm.meta["training"])
    return gm


def guarded(gm: fx.GraphModule) -> fx.GraphModule:
    """It refuses inputs that it would ignore."""
    for node in gm.graph.nodes:
        node.type = None  # annotations as strings cannot be pickled
    guard_inputs(gm, gm.meta["fixed"])
    return gm


def first_is_optional(model: nn.Module) -> bool:
    """`forward(self, input_ids=None)`: a trace without an example would make a constant of what is always given."""
    check_model(model)
    inputs = list(inspect.signature(model.forward).parameters.values())
    return bool(inputs) and inputs[0].default is None


def has_optional(gm: fx.GraphModule) -> bool:
    """Whether the graph, traced without an example, refuses inputs that calls may well give."""
    return any(value is None or value == {} for value in gm.meta["fixed"].values())


def one_node(model: nn.Module, why: str) -> fx.GraphModule:
    """The model as it is, for calls of any form; only the layers inside are known."""
    gm = as_one_node(own_copy(model))
    signature = inspect.signature(model.forward)
    gm.meta.update(islands={"": Island("", why, "")}, unread=[], fixed={}, signature=signature)
    gm.meta["training"] = training_flags(model)
    for node in gm.graph.nodes:
        node.meta["path"] = ""
    return gm


def walk_of(model: nn.Module, example: Any, heads: Heads = "whole") -> Walk:
    """The labelled graph of `model`."""
    call = call_of(example)
    return Walk.through(traced(model, call).eval(), call, heads)


def shallower(
    model: nn.Module,
    example: Any,
    merge: int | str | Sequence[str],
    depth: int | Sequence[str],
    batches: Any = None,
    progress: bool | None = None,
) -> tuple[nn.Module, dict[str, list[str]]]:
    """The model with blocks merged and branches gone, and which."""
    from sparsebit.sparse.depth import shorten
    from sparsebit.sparse.merging import merge as merge_blocks

    done: dict[str, Any] = {"merged": [], "shortened": []}
    if merge:
        merged = merge_blocks(model, example, merge, batches, progress)
        done["merged"] = merged.merged
        model = merged if merged.merged else model
    if depth:
        model = shorten(model, example, depth, batches, progress)
        done["shortened"] = model.shortened
    return model, done


def _of_smaller(
    budget: dict[str, float], model: nn.Module, small: nn.Module, example: Any
) -> dict[str, float]:
    """The budget, a share of what `model` costs, as one of what `small` costs."""
    from sparsebit.sparse.costs import EXACT

    for name, share in budget.items() if small is not model else ():
        cost = EXACT[name](walk_of(model, example))
        budget = {name: min(1.0, share * cost(model) / cost(small))}
    return budget


def _how_much(ratio: Any, budgets: dict[str, Any]) -> dict[str, float]:
    """The budget that was given, if any."""
    given = {name: value for name, value in budgets.items() if value is not None}
    asked = {**given, **({} if ratio is None else {"ratio": ratio})}
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{name}: expected a number such as 0.5, got {value!r}")
    if len(asked) > 1:
        raise ConfigError("prune: say how much with one of ratio, macs, params and latency")
    if ratio is not None and not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    return given


def _settings(config: Any, said: dict[str, Any], budget: bool) -> SparseConfig:
    """The config, and what was said beside it; half of the channels go if nothing was."""
    cfg = SparseConfig.load({"SPARSER": {"RATIO": 0.5}} if config is None else config)
    if "RATIO" in said and cfg.sparser.pattern:
        raise ConfigError(
            f"ratio: PATTERN {cfg.sparser.pattern} of the config says how much goes; leave out one"
        )
    if budget and not cfg.sparser.ratio and not cfg.sparser.specific:
        said = {**said, "RATIO": 0.5}  # the budget says how much: what counts is that it is above zero
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
    from sparsebit.sparse.sparse_model import SparseModel

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
                "batches: is a generator and used up, so layers are not refit; pass a list or a loader"
            )
        else:
            smodel.tune_batchnorm(batches, progress)
            if cfg.sparser.type == "structured":
                smodel.refit(batches, whole, progress)
    small = smodel.compact()
    vars(getattr(small, "pruning_plan", Plan())).update(done)  # single weights have none
    return small
