"""From a user's model to the graph that is labelled, masked and cut."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn

from sparsebit.errors import SparsebitError
from sparsebit.graph.islands import Island, as_one_node, warn_of
from sparsebit.graph.run.batches import refuse_arrays
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.modes import set_training, training_flags
from sparsebit.graph.run.signature import signature_of
from sparsebit.graph.trace import LeafTracer, own_copy, trace, unwrapped
from sparsebit.graph.trace.guards import guard_inputs
from sparsebit.sparse.modules import SMODULE_MAP
from sparsebit.sparse.trace.attention import OPEN
from sparsebit.sparse.trace.graph_form import graph_form
from sparsebit.sparse.trace.sharing import own_memory


def call_of(example: Any, model: nn.Module) -> Call:
    """The arguments of one forward of `model`; graph/run/calls.py lists the forms that `example` may have."""
    refuse_arrays("example", example)
    _check_forward(model)
    return Call.of_example(example, signature_of(unwrapped(model)))


def check_model(model: Any) -> None:
    """Refuse a value that is not a float model, or that has weights that are not finite."""
    _check_forward(model)
    if any(hasattr(module, "named_quantizers") for module in model.modules()):
        raise SparsebitError(
            "model: is a QuantModel already; prune the float model first, then quantize that"
        )
    _check_finite(model)


def _check_forward(model: Any) -> None:
    if not isinstance(model, nn.Module):
        if isinstance(model, type):
            what = f"the class {model.__name__}"
        else:
            what = f"a {type(model).__name__}"
        raise SparsebitError(f"model: expected an nn.Module, got {what}; weights alone cannot be pruned")
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise SparsebitError(
            f"model: {type(model).__name__} has no forward(); pass the module that is called"
        )


def _check_finite(model: nn.Module) -> None:
    """Every weight of masked layers must be finite. Elsewhere -inf may be intended, as in a mask of
    attention."""
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
    """The graph that is masked and cut. Without an example, torch's attention blocks stay closed and whole."""
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
    # those of a merged model
    gm.meta["unread"] = [*getattr(model, "meta", {}).get("unread", ()), *gm.meta["unread"]]
    gm.meta["training"] = training_flags(gm) | training_flags(model)
    return gm


def simplified(gm: fx.GraphModule, example: Call | None) -> fx.GraphModule:
    """Bring the graph into the form that channel rules know; an example is needed to find it."""
    if example is None:
        return gm
    known = {key: gm.meta[key] for key in ("fixed", "unread", "training")}
    gm = graph_form(gm.eval(), example)  # a run in training mode would change the batch norms
    gm.meta.update(known)
    set_training(gm, gm.meta["training"])
    return gm


def guarded(gm: fx.GraphModule) -> fx.GraphModule:
    """Let the graph refuse inputs that it would ignore."""
    for node in gm.graph.nodes:
        node.type = None  # annotations in the form of strings cannot be pickled
    guard_inputs(gm, gm.meta["fixed"])
    return gm


def first_is_optional(model: nn.Module) -> bool:
    """`forward(self, input_ids=None)`: a trace without an example would replace a required input by a
    constant."""
    check_model(model)
    inputs = list(inspect.signature(model.forward).parameters.values())
    return bool(inputs) and inputs[0].default is None


def has_optional(gm: fx.GraphModule) -> bool:
    """Does the graph, traced without an example, refuse inputs that real calls may use?"""
    return any(value is None or value == {} for value in gm.meta["fixed"].values())


def one_node(model: nn.Module, why: str) -> fx.GraphModule:
    """The model as one node, for calls of any form; only the layers inside are known."""
    gm = as_one_node(own_copy(model))
    signature = inspect.signature(model.forward)
    gm.meta.update(islands={"": Island("", why, "")}, unread=[], fixed={}, signature=signature)
    gm.meta["training"] = training_flags(model)
    for node in gm.graph.nodes:
        node.meta["path"] = ""
    return gm
