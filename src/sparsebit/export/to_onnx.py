"""torch's exporter, with marks in the graph."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparsebit.errors import ExportError

log = logging.getLogger("sparsebit")


def to_onnx(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    opset: int,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Any = None,
    dynamic_shapes: Any = None,
    verbose: bool = False,
) -> Any:
    """An onnx_ir.Model of `model`; the caller has put it into eval and export mode."""
    require("onnx", "onnxscript", "onnx_ir")
    if dynamic_axes is not None and dynamic_shapes is None:
        dynamic_shapes = shapes_from_axes(dynamic_axes, args, kwargs, input_names)
    try:
        with _quiet(verbose):
            program = torch.onnx.export(
                model,
                args,
                kwargs=dict(kwargs),
                input_names=input_names,
                output_names=output_names,
                opset_version=opset,
                dynamic_shapes=dynamic_shapes,
                dynamo=True,
                verbose=verbose,
            )
    except Exception as error:
        raise ExportError(_explain(error)) from error
    assert program is not None
    return program.model


def require(*packages: str) -> None:
    """The packages that export needs; which extra brings them."""
    import importlib.util

    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        raise ExportError(f"export needs {', '.join(missing)}: pip install 'sparsebit[onnx]'")


def shapes_from_axes(
    dynamic_axes: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Any
) -> tuple[Any, ...] | dict[str, Any]:
    """`{"x": {0: "batch"}}` or `{"x": [0, 2]}`, the old form -> torch.export's dynamic_shapes."""
    dims: dict[str, Any] = {}

    def dim(label: str) -> Any:
        return dims.setdefault(label, torch.export.Dim.DYNAMIC)

    def of(name: str) -> dict[int, Any] | None:
        axes = dynamic_axes.get(name)
        if axes is None:
            return None
        labels = axes.items() if isinstance(axes, Mapping) else ((i, f"{name}_{i}") for i in axes)
        return {int(i): dim(str(label)) for i, label in labels}

    names = list(names or [])
    unknown = [n for n in dynamic_axes if n not in names and n not in kwargs]
    if len(names) < len(args):
        if unknown and not names:
            names = list(dynamic_axes)[: len(args)]  # the old exporter did not ask for input_names either
        names += [f"arg{i}" for i in range(len(names), len(args))]
    by_position = tuple(of(names[i]) for i in range(len(args)))
    if not kwargs:
        return by_position
    return {**{names[i]: shape for i, shape in enumerate(by_position)}, **{k: of(k) for k in kwargs}}


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """torch's exporter talks about packages that are not there and about its own plans."""
    if verbose:
        yield
        return
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _explain(error: BaseException) -> str:
    """The innermost reason, without the exporter's framing."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (
        f"torch's exporter cannot translate the model: {type(error).__name__}: {' '.join(lines[:6])[:800]}\n"
        f"  fix: replace the op it names, or put the module around it into SKIP_TRACE_MODULES and export without it"
    )
