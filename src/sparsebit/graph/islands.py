"""Islands: modules that torch.fx cannot trace. They stay leaves, run their own code, and keep the reason."""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

log = logging.getLogger("sparsebit")
GRAPH_FOLDER = Path(__file__).parent  # this file stands directly in sparsebit/graph
# Frames of files in these folders are not the user's code.
OWN = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, GRAPH_FOLDER))


@dataclass(frozen=True)
class Island:
    """A module that stays a leaf: its `path` ("" is the whole model), the error that stopped the trace, and
    the line."""

    path: str
    error: str
    line: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self.error}" + (f" ({self.line})" if self.line else "")


def island(path: str, error: BaseException) -> Island:
    """The island at `path`, with the line of the user's code that `error` came from."""
    text = " ".join(str(error).split())
    if not (len(text) <= 200):
        text = f"{text[:200]} ..."
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OWN)]
    line = ""
    if frames:
        line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    return Island(path, f"{type(error).__name__}: {text}", line)


def warn_of(islands: Mapping[str, Island]) -> None:
    """One line for each reason, with the first two islands that have it."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for found in islands.values():
        reasons.setdefault((found.error, found.line), []).append(found.path or "the model")
    for (error, line), paths in reasons.items():
        more = ""
        if len(paths) > 2:
            more = f" and {len(paths) - 2} more"
        shown = line if len(line) <= 100 else f"{line[:100]} ..."
        log.warning(
            "not traced, runs its own code: %s%s: %s%s",
            ", ".join(paths[:2]),
            more,
            error,
            f" ({shown})" if shown else "",
        )


class Whole(nn.Module):
    """A model that stays one node: its own forward runs, with any arguments."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.root = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.root(*args, **kwargs)


def with_named_inputs(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """A graph of as_one_node() with one input for each argument of this call.

    torch.export passes arguments to a graph by position, and loses the names of `**kwargs`.
    """
    if not isinstance(getattr(gm, "whole", None), Whole):
        return gm
    known = gm.meta.get("signature")
    names = list(known.parameters) if known is not None else []
    names = [names[i] if i < len(names) else f"input_{i}" for i in range(len(args))]
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in (*names, *kwargs)}
    call = (tuple(given[name] for name in names), {name: given[name] for name in kwargs})
    graph.output(graph.call_module("whole", call))
    return fx.GraphModule(gm, graph, type(gm).__name__)


def as_one_node(model: nn.Module) -> fx.GraphModule:
    """A graph whose only op is `model` itself."""
    holder = nn.Module()
    holder.whole = Whole(model)
    holder.training = model.training
    graph = fx.Graph()
    args = (graph.placeholder("*args"), graph.placeholder("**kwargs"))
    graph.output(graph.call_module("whole", args))
    return fx.GraphModule(holder, graph, type(model).__name__)


def alone(layer: nn.Module) -> nn.Module:
    """A network of one layer, with the inputs of the layer."""
    inputs = list(inspect.signature(layer.forward).parameters.values())
    if len(inputs) == 1 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in inputs):
        return nn.Sequential(layer)
    graph = fx.Graph()
    given = {p: graph.placeholder(p.name, default_value=p.default) for p in inputs}
    required = tuple(node for p, node in given.items() if p.default is p.empty)
    optional: dict[str, Any] = {p.name: node for p, node in given.items() if p.default is not p.empty}
    graph.output(graph.call_module("0", required, optional))
    return fx.GraphModule({"0": layer}, graph)
