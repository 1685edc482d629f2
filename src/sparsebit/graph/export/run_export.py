"""torch.export with as many dynamic sizes as possible and useful.

Height and width of images stay fixed: with dynamic ones, torch.export takes minutes (swin_t: 178 s instead of
6).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError
from sparsebit.graph.export.structures import Build, check_call, take_apart
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.compare import difference

log = logging.getLogger("sparsebit")


def run_export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, Build]:
    """Export `model`; returns the exported module and a function that rebuilds the model's output from its
    leaves.

    First every size is dynamic (of images the batch), then only the batch size, then none. `model` is changed
    and cannot be used afterwards.
    """
    trouble: Exception | None = None
    signature = inspect.signature(model.forward)
    _register_dataclasses((args, kwargs))
    outputs = _return_leaves(model, kwargs)
    for fixed, axes, example in _attempts(args, kwargs):
        try:
            with _quiet():
                shapes = _dynamic(model, example, axes)
                program = torch.export.export(model, *example, dynamic_shapes=shapes, strict=False)
                exported = program.module(check_guards=False)  # of torch 2.9 they fail with several inputs
            assert isinstance(exported, fx.GraphModule)
            # also the example, if its batch was doubled for the export
            check_call(exported, signature, args, kwargs)
            build = outputs[-1]
            if not _agrees(exported, model, (args, kwargs)):
                raise TraceError("the exported graph computes another output than the model")
        except Exception as error:  # torch.export fails in many ways; the next form is tried
            trouble = trouble or error
            continue
        if trouble is not None:
            log.warning(
                "the graph keeps %s of the example, because torch.export failed: %s",
                fixed,
                _first_line(trouble),
            )
        # torch.export takes sizes as larger than 1, so `if len(x) == 1` leaves no trace: try it
        exported.meta["not_for_one"] = not _agrees(exported, model, _first_sample(args, kwargs))
        return exported, build
    assert trouble is not None
    raise _explained(model, args, kwargs, trouble) from trouble


def _return_leaves(model: nn.Module, kwargs: dict[str, Any]) -> list[Build]:
    """Let `model` return only the tensors inside its output; the list receives functions that rebuild the
    output."""
    forward = model.forward
    builds: list[Build] = []

    @functools.wraps(forward)
    def plain(*args: Any, **named: Any) -> tuple[Any, ...]:
        out = forward(*args, **named)
        leaves: list[Any] = []
        builds.append(take_apart(out, leaves) or (lambda _: out))
        return tuple(leaves)

    vars(plain)["__signature__"] = _without_var_keyword(inspect.signature(forward), kwargs)
    model.forward = plain
    return builds


def _without_var_keyword(signature: inspect.Signature, kwargs: dict[str, Any]) -> inspect.Signature:
    """Replace `**named` by the given names: torch.export loses their dynamic sizes otherwise."""
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    extra = [name for name in kwargs if name not in signature.parameters]
    return signature.replace(
        parameters=[*kept, *(inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in extra)]
    )


def _explained(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trouble: Exception
) -> TraceError:
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:  # the user's forward may raise anything
        return TraceError(f"{type(model).__name__} does not run on the example: {_first_line(error)}")
    return TraceError(
        f"torch.export cannot trace {type(model).__name__}: {_first_line(trouble)}\n  fix: trace='fx' keeps what it "
        f"cannot trace as an island and quantizes the layers inside"
    )


def _attempts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, int, Any]]:
    """Tuples (a text that names the fixed sizes, number of dynamic leading axes, example). torch.export fixes sizes
    of 1, so a batch of one is doubled."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
    single = bool(tensors) and all(x.shape[0] == 1 for x in tensors)
    fresh = lambda: pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
    double = lambda x: torch.cat([x, x]) if single and isinstance(x, Tensor) and x.dim() else x
    batch = lambda: pytree.tree_map(double, fresh())  # new tensors: a failed export leaves marks on them
    known = [("the batch size", 99, fresh())] if single else []
    some = [("", 99, batch()), *known, ("all sizes but that of the batch", 1, batch())]
    return [*some, ("all sizes", 0, fresh())]


def _first_sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x[:1] if x.dim() else x, (args, kwargs))


@torch.no_grad()
def _agrees(exported: nn.Module, model: nn.Module, call: Any) -> bool:
    """Do both return the same? A call that the model itself refuses proves nothing."""
    results = []
    for module in (model, exported):
        buffers = [(b, b.clone()) for b in module.buffers()]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                results.append(pytree.tree_leaves(Call(*call).run(module)))
        except Exception:  # of the model: the call proves nothing; of the graph only: they differ
            return module is model
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)
    return difference(results[1], results[0]) is None


def _dynamic(model: nn.Module, example: Any, axes: int) -> Any:
    shapes = torch.export.ShapesCollection()
    for x in pytree.tree_leaves(example):
        if isinstance(x, Tensor):
            if x.dim() > 3 and x.is_floating_point():
                free = 1
            else:
                free = axes
            shapes[x] = dict.fromkeys(range(x.dim())[:free], torch.export.Dim.AUTO)
    if axes and len(shapes):
        return shapes.dynamic_shapes(model, *example)
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Gradients on and torch's fused attention off, because both change the recorded ops; nothing on stderr.

    Where torch.export fails, it logs the reason and prints the whole graph. The error is enough.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    before = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings(), torch.enable_grad(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fused)


def _register_dataclasses(inputs: Any) -> None:
    """Register dataclasses among the inputs with torch.export."""
    while True:
        leaves = pytree.tree_leaves(inputs)
        unknown = {type(x) for x in leaves if dataclasses.is_dataclass(x) and not isinstance(x, type)}
        if not unknown:
            return
        for cls in unknown:
            torch.export.register_dataclass(cls)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
