"""Functional dropout whose `training` is `self.training` becomes a module, which follows train() and eval().

A model is traced in eval mode, where that flag is an ordinary False. In a second trace every read of
`module.training` returns a new object, so the origin of the False is known; nothing else of that trace is
used. The rate of attention that has dropout only in training is read from a trace in training mode.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.graph.ops import argument
from sparsebit.graph.rewrite import fresh_name
from sparsebit.graph.run.modes import evaluating
from sparsebit.graph.trace.patches import FLAGS, patched
from sparsebit.graph.trace.proxies import Flag
from sparsebit.graph.trace.tracer import LeafTracer

log = logging.getLogger("sparsebit")

OFF = "functional dropout stays off in training, write nn.Dropout in its place"
ATTENTION = "dropout of scaled_dot_product_attention, if there is any, stays off in training"
MODULES: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
    torch.dropout: nn.Dropout,
    torch.alpha_dropout: nn.AlphaDropout,
    torch.feature_alpha_dropout: nn.FeatureAlphaDropout,
}


class Rate(nn.Module):
    """The rate of a dropout that is not a module: `p` in training, otherwise 0. Traces keep it as a leaf."""

    bookkeeping = True
    is_leaf = True

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self) -> float:
        return self.p if self.training else 0.0

    def extra_repr(self) -> str:
        return str(self.p)


def mark_switched(root: nn.Module, graph: fx.Graph, tracer: LeafTracer) -> None:
    """Mark the dropouts in `graph`, a trace of `root` in eval mode, that `root.train()` would switch on."""
    if not any(_training(node) is False for node in graph.nodes):
        return
    islands = dict(tracer.islands)
    try:
        with patched(FLAGS):
            again = tracer.trace(root)
    except Exception as error:  # torch.set_grad_enabled(self.training) takes nothing but a bool
        log.warning("%s: %s: %s", OFF, type(error).__name__, error)
        return
    finally:
        tracer.islands = islands
    pairs = list(zip(graph.nodes, again.nodes))
    if len(graph.nodes) != len(again.nodes) or any(_kind(a) != _kind(b) for a, b in pairs):
        log.warning("%s: the forward does something else if self.training is not a bool", OFF)
        return
    for node, seen in pairs:
        flag = _training(seen)
        node.meta["switched"] = isinstance(flag, Flag) and not flag.asked
        if isinstance(flag, Flag) and flag.asked:
            log.warning("%s: %s, the forward tests self.training", OFF, node)


def mark_rates(root: nn.Module, graph: fx.Graph, tracer: LeafTracer) -> None:
    """Mark attention that has dropout only in training, `dropout_p=self.p if self.training else 0.0`, with
    its rate.

    The rate is read from a trace of `root` in training, which must have the same calls of attention.
    """
    known = _attention(graph)
    islands = dict(tracer.islands)
    if not any(_rate(node) == 0 for node in known):
        return
    try:
        with evaluating(root, training=True):
            there = list(map(_rate, _attention(tracer.trace(root))))
    except Exception as error:  # the user's code in training mode; the trace in eval mode is kept
        log.info("not traced in training mode: %s: %s", type(error).__name__, error)
        there = []
    finally:
        tracer.islands = islands
    if len(there) != len(known):
        log.warning("%s: the forward runs other calls in training", ATTENTION)
        return
    for node, rate in zip(known, there):
        if _rate(node) == 0 and rate and isinstance(rate, float):
            node.meta["rate"] = rate


def switched_to_modules(gm: fx.GraphModule, model: nn.Module) -> None:
    """Turn each marked dropout into a module, beside the layers of the module whose forward calls it."""
    for node in list(gm.graph.nodes):
        if "rate" in node.meta:
            _follow(gm, node, model)
        if node.meta.pop("switched", False):
            options = _options(node)
        else:
            options = {}
        if options and not isinstance(options.get("p"), fx.Node):
            inside = _inside(node)
            made = MODULES[node.target](options.get("p", 0.5), options.get("inplace", False))
            node.target = fresh_name(gm, f"{inside}.{node.target.__name__}".lstrip("."))
            gm.add_submodule(node.target, made.train(model.get_submodule(inside).training))
            node.op = "call_module"
            node.args = (options["input"],)
            node.kwargs = {}
    gm.recompile()


def _follow(gm: fx.GraphModule, node: fx.Node, model: nn.Module) -> None:
    """Take the rate of attention from a module, which knows whether it is in training."""
    inside = _inside(node)
    rate = node.meta.pop("rate")
    path = fresh_name(gm, f"{inside}.dropout_rate".lstrip("."))
    gm.add_submodule(path, Rate(rate).train(model.get_submodule(inside).training))
    with gm.graph.inserting_before(node):
        found = gm.graph.call_module(path)
    found.meta["nn_module_stack"] = dict(node.meta.get("nn_module_stack") or {})
    if len(node.args) > 4:
        node.update_arg(4, found)
    else:
        node.update_kwarg("dropout_p", found)


def _attention(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is F.scaled_dot_product_attention]


def _rate(node: fx.Node) -> Any:
    return argument(node, 4, "dropout_p", 0.0)


def _inside(node: fx.Node) -> str:
    """The path of the module whose forward has the call."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _kind(node: fx.Node) -> Any:
    return node.op, None if node.op == "get_attr" else node.target  # constants are numbered in one sequence


def _training(node: fx.Node) -> Any:
    """The flag of a functional dropout; None if it is another op."""
    return _options(node).get("training")


def _options(node: fx.Node) -> dict[str, Any]:
    if node.op != "call_function" or node.target not in MODULES:
        return {}
    found = {**dict(zip(("input", "p", "training", "inplace"), node.args)), **node.kwargs}
    result: dict[str, Any] = {}
    for name, value in found.items():
        result["training" if name == "train" else name] = value
    return result
