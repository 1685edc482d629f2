"""The smaller model for the user: compared with the masked one, and in the class of the user's model where
possible."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.compare import Tolerance, difference
from sparsebit.graph.run.modes import set_training, training_flags
from sparsebit.graph.trace import own_copy
from sparsebit.sparse.cut.size_conditions import asks_for_cut_sizes
from sparsebit.sparse.cut.surgery import Cut, check_equal

log = logging.getLogger("sparsebit")

NOT_IN_EVAL = "the forward in eval mode, which is traced, does not use it"


@dataclass
class Compacted:
    """A smaller model, and the reasons for a report."""

    model: nn.Module
    as_written: bool  # True: the class of the user's model; False: a graph
    reasons: list[str] = field(default_factory=list)


def compact(model: nn.Module, cut: Cut, as_written: bool | None = None) -> Compacted:
    """The smaller model, after it was compared with the masked one; `model` has the weights that are cut.

    as_written   True: the user's class. False: a graph. None: the user's class if it computes the same.
    """
    small = cut.compact()
    check_equal(cut, cut.masked(), small)
    if as_written is False:
        own = None
    else:
        own = _as_written(model, cut, small, sure=as_written is True)
    made = Compacted(small if own is None else own, as_written=own is not None)
    set_training(made.model, training_flags(model))
    if own is None and (gone := _unread(cut)):
        log.warning("the pruned %s is a traced graph without %s: %s", type(model).__name__, gone, NOT_IN_EVAL)
        made.reasons.append(f"nothing of {gone}: {NOT_IN_EVAL}")
    return made


def _as_written(model: nn.Module, cut: Cut, small: fx.GraphModule, sure: bool) -> nn.Module | None:
    """The user's class with smaller layers; None if its code depends on the old sizes."""
    if isinstance(model, fx.GraphModule) or asks_for_cut_sizes(cut):
        return None
    own = own_copy(model).eval()
    unused = {name for name, _ in own.named_parameters()} - {name for name, _ in small.named_parameters()}
    if unused:  # heads that only run in training would keep the old sizes
        log.info("the pruned %s is a traced graph without %s", type(model).__name__, sorted(unused)[0])
        return None
    try:
        cut.cut_parameters(own)
        if sure:
            differs = None
        else:
            differs = _difference(own, small.eval(), cut.walk.example)
    except Exception as error:  # a size in the user's code, or a path that only the graph has
        differs = str(error)
    if differs is None:
        return own
    log.info("the pruned %s is a traced graph: its own code computes %s", type(model).__name__, differs)
    return None


def _difference(own: nn.Module, small: fx.GraphModule, example: Call) -> str | None:
    """The first place where both differ, if any.

    Modules inside are compared too. A size in the code may not change the output of the example: attention
    may be nearly uniform, and a scale may start at zero.
    """
    got, want = (_outputs(m, example) for m in (own, small))
    for path in [path for path in want if path in got]:
        if difference(got[path], want[path], Tolerance.CLOSE) is not None:
            return f"something else at {path or 'its output'}"
    return None


def _outputs(model: nn.Module, example: Call) -> dict[str, list[Any]]:
    """The inputs and outputs of every module, call by call; the output of the model has the key ""."""
    found: dict[str, list[Any]] = {}
    copied = lambda value: pytree.tree_map_only(Tensor, torch.clone, value)  # later modules may write into it
    keep = lambda path: lambda _, *values: found.setdefault(path, []).append(copied(values))
    inside = [(path, module) for path, module in model.named_modules() if path]
    hooks = [module.register_forward_hook(keep(path), with_kwargs=True) for path, module in inside]
    args, kwargs = example.copy()
    try:
        with torch.no_grad():
            found[""] = [model(*args, **kwargs)]
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _unread(cut: Cut) -> str:
    """The layers of the user's model that are missing in the graph."""
    names = cut.walk.gm.meta.get("unread", ())
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return ", ".join(layers[:3]) + f" and {len(layers) - 3} more" * (len(layers) > 3)
