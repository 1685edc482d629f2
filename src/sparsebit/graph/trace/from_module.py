"""From an nn.Module to a GraphModule over a copy of everything; the user's model never changes."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import (
    SpectralNorm,
    SpectralNormLoadStateDictPreHook,
    remove_spectral_norm,
)
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError
from sparsebit.graph.islands import Whole, alone, as_one_node, island
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.modes import evaluating
from sparsebit.graph.trace.check import disagreement, relax
from sparsebit.graph.trace.dropout import mark_rates, mark_switched, switched_to_modules
from sparsebit.graph.trace.no_grad import bracket_no_grad
from sparsebit.graph.trace.packed import settle_lists
from sparsebit.graph.trace.tracer import LeafTracer, State

log = logging.getLogger("sparsebit")
SCRIPTED = (
    "is compiled TorchScript, which has no Python code left to trace; pass the nn.Module that it was made from (its "
    "weights are in scripted.state_dict())"
)


def trace(
    model: nn.Module, tracer: LeafTracer, example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
) -> fx.GraphModule:
    """A GraphModule over a copy of `model`. Every node has `meta["path"]`, its place in the model.

    A module that cannot be traced becomes an island: a leaf that runs its own code, in the worst case the
    whole model. `gm.meta["islands"]` lists the islands, "unread" the parameters that the graph does not read.

    `example` decides which optional inputs are used and how lists and dicts of inputs look. Without one,
    optional inputs keep their defaults, unless all inputs are optional. The example also proves the graph: if
    the outputs of graph and model differ, the model stays one node.

    The forward is traced in eval mode. The modules get their train/eval flags back afterwards, and
    `F.dropout(..., training=self.training)` becomes a module that has such a flag.
    """
    signature = inspect.signature(model.forward)
    if example is None:
        shown = None
    else:
        shown = Call(example[0], dict(example[1]))
    inputs = _inputs(signature, shown)
    tracer.example = {} if shown is None else inputs
    tracer.shown = shown
    for stays, as_shown in _ways(inputs, type(model)):
        if as_shown and tracer.islands and "" not in tracer.islands:
            break  # called with all its inputs, most of the model can be traced
        tracer.inputs = stays
        tracer.islands = {}
        tracer.as_shown = as_shown
        tracer.lists_left = {k for k, v in inputs.items() if k not in stays and type(v) is list}
        copied, graph = _trace_around_islands(model, tracer)
        if graph is not None:
            gm = fx.GraphModule(copied, graph, type(model).__name__)
            switched_to_modules(gm, copied)
            relax(gm, copied, shown)
            wrong = disagreement(gm, copied, shown)
            if wrong is not None:
                tracer.islands = {"": wrong}
                graph = None
        if not tracer.islands:
            break
    if graph is None:
        gm = as_one_node(copied)
    used = {str(n.target) for n in gm.graph.nodes if n.op == "call_module"} | {""}
    gm.meta["islands"] = {path: found for path, found in tracer.islands.items() if path in used}
    read = {id(p) for p in gm.parameters()}
    gm.meta["unread"] = [name for name, p in copied.named_parameters() if id(p) not in read]
    gm.meta["signature"] = signature
    unsaid = _left_out(signature, shown) if tracer.as_shown else {}
    if graph is None:
        gm.meta["fixed"] = {}
    else:
        gm.meta["fixed"] = _fixed(signature, {**unsaid, **tracer.inputs})
    for node in gm.graph.nodes:
        node.meta["path"] = _path_of(node, gm)
    return gm


def _trace_around_islands(model: nn.Module, tracer: LeafTracer) -> tuple[nn.Module, fx.Graph | None]:
    """Trace until there is no new island, so that the last graph has no half-traced module. None: the model
    is an island."""
    while True:
        known = dict(tracer.islands)
        recorded = len(tracer.namespaces)
        copied = own_copy(model)
        if tracer.is_leaf_module(copied, "") and not isinstance(copied, (nn.ModuleList, nn.ModuleDict)):
            copied = alone(copied).train(copied.training)  # a single layer is a network too
        state = State(copied)
        try:
            with evaluating(copied), tracer.prepared_torch(), torch.enable_grad():
                graph = tracer.trace(copied)
                lists = tracer.lists
                state.settle()
                # it is compared with other traces, so nothing may change before
                mark_switched(copied, graph, tracer)
                mark_rates(copied, graph, tracer)
                settle_lists(graph, lists)
            state.settle()
        except Exception as error:  # the user's forward runs on proxies and may raise anything
            tracer.islands[""] = island("", error)
        if len(tracer.namespaces) > recorded:  # the next trace records the call that stopped this one
            tracer.islands = known
        elif "" in tracer.islands:
            return own_copy(model), None
        elif len(tracer.islands) == len(known):
            bracket_no_grad(graph)
            for node in graph.nodes:  # torch.fx.wrap would be called again, on names that are no functions
                node.meta.pop("is_wrapped", None)
            return copied, graph


def _inputs(signature: inspect.Signature, example: Call | None) -> dict[str, Any]:
    """The known inputs by name: those of the example, or the defaults."""
    if example is not None:
        try:
            return example.bind(signature)
        except TypeError as error:
            raise TraceError(f"the example does not fit forward{signature}: {error}") from None
    known = {}
    for p in signature.parameters.values():
        known[p.name] = {} if p.kind is p.VAR_KEYWORD else p.default
    defaults = {name: value for name, value in known.items() if value is not inspect.Parameter.empty}
    if len(defaults) < len(known):
        return defaults
    # Nothing is required, and a call without inputs computes nothing: an input that may be None is given.
    return {name: value for name, value in defaults.items() if value is not None}


def _left_out(signature: inspect.Signature, example: Call | None) -> dict[str, Any]:
    """Inputs that a call like the example leaves out: a decorated forward fills them in."""
    if example is None:
        given = {}
    else:
        given = signature.bind(*example[0], **example[1]).arguments
    nothing: dict[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}
    known = {p.name: nothing.get(p.kind, p.default) for p in signature.parameters.values()}
    return {k: v for k, v in known.items() if k not in given and v is not inspect.Parameter.empty}


def _ways(inputs: dict[str, Any], kind: Any) -> list[tuple[dict[str, Any], bool]]:
    """Pairs: the known inputs, and whether a decorated forward is called like the example or with all inputs."""
    decorated = inspect.unwrap(kind.forward) is not kind.forward
    takes = inspect.signature(kind.forward).parameters.values()
    by_position = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in takes)
    calls = ([False] if by_position or not decorated else []) + [True] * decorated
    found: list[tuple[dict[str, Any], bool]] = []
    for as_shown in calls:
        for known in _known(inputs):
            found.append((known, as_shown))
    return found


def _known(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers and lists of numbers (lengths of sequences) stay inputs, unless control flow needs them, lists
    first."""
    is_number = lambda v: type(v) in (int, float)
    is_list = lambda v: type(v) is list and bool(v) and all(map(is_number, v))
    known = {k: v for k, v in inputs.items() if not is_number(v)}
    ways = [{k: v for k, v in known.items() if not is_list(v)}, known, inputs]
    return [way for i, way in enumerate(ways) if len(way) > len(ways[i - 1]) or not i]


def _fixed(signature: inspect.Signature, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that are constants in the graph."""
    has_tensor = lambda v: any(isinstance(x, Tensor) for x in pytree.tree_leaves(v))
    found: dict[str, Any] = {}
    for name in signature.parameters:
        if name in inputs and not has_tensor(inputs[name]):
            found[name] = inputs[name]
    return found


def unwrapped(model: Any) -> Any:
    """The user's model without torch.compile, DataParallel and DistributedDataParallel, which only run it."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, nn.Module):
        # of an OptimizedModule
        name = "_orig_mod"
        if isinstance(model, parallel):
            name = "module"
        inside = dict(model.named_children()).get(name)
        if inside is None:
            break
        log.info("%s: taken out of its %s", type(inside).__name__, type(model).__name__)
        model = inside
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TraceError(f"model: {SCRIPTED}")
    if not isinstance(model, nn.Module):
        return model
    lazy = [name for name, p in model.named_parameters() if torch.nn.parameter.is_lazy(p)]
    if lazy:
        raise TraceError(
            f"model: {lazy[0]} has no shape yet; run the model once on a batch before you give it"
        )
    return model


def own_copy(model: nn.Module) -> nn.Module:
    """A copy of everything that the model holds, with plain weights where a hook computes them before each
    call."""
    # a tensor that a forward stored (`self.features = x`) belongs to an autograd graph: copy only its value
    left = []
    for m in model.modules():
        for v in vars(m).values():
            if isinstance(v, Tensor) and not v.is_leaf:
                left.append(v)
    try:
        copied = copy.deepcopy(model, {id(v): v.detach().clone() for v in left})
    except Exception as error:  # the user's classes may define __deepcopy__
        raise TraceError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Sparsebit works on a "
            f"copy and never changes your model; detach non-leaf tensors stored in the model, or give the "
            f"classes that refuse a __deepcopy__"
        ) from error
    for module in copied.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm):
                remove_weight_norm(module, hook.name)
            elif isinstance(hook, BasePruningMethod):
                prune.remove(module, hook._tensor_name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(module, hook.name)
                for key, left_behind in list(module._load_state_dict_pre_hooks.items()):
                    if isinstance(getattr(left_behind, "hook", None), SpectralNormLoadStateDictPreHook):
                        del module._load_state_dict_pre_hooks[key]
    return copied


def _path_of(node: fx.Node, gm: fx.GraphModule) -> str:
    """`layer1.0.conv1` for a module, `layer1.0.add` for a function called in the forward of `layer1.0`."""
    if node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), Whole):
        return ""
    if node.op in ("call_module", "get_attr", "placeholder", "output"):
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    inside = list(stack.values())[-1][0] if stack else ""
    if isinstance(node.target, str):
        name = node.target
    else:
        name = getattr(node.target, "__name__", node.name)
    return f"{inside}.{name}".lstrip(".")
