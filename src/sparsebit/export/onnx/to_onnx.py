"""torch's exporter, with marks in the graph."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import ExportError
from sparsebit.export.onnx.operands import CommonType
from sparsebit.graph.islands import with_named_inputs
from sparsebit.graph.run.signature import ANYTHING

RECURRENT = ("torch.nn.modules.rnn", "torch.nn.utils.rnn")
PADDED = (
    "for the file, give the recurrent layer the padded tensor itself (a layer of one direction computes the same up "
    "to the end of each sequence), or cut this part off and export the rest of the model"
)

CACHE = (
    "a file gives only tensors: the model must return no cache; set model.config.use_cache = False before it is "
    "quantized, or give use_cache=False with the example, the batches and the dummy"
)

EXPERTS = (
    "how many rows each expert gets is decided by the data, and a file has fixed sizes; call "
    "model.set_experts_implementation('batched_mm') before the model is quantized (transformers 5)"
)


def to_onnx(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], opset: int, **options: Any
) -> Any:
    """An onnx_ir.Model of `model`; the caller has put it into eval and export mode."""
    return to_program(model, args, kwargs, opset, **options).model


def to_program(
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
    """A torch.onnx.ONNXProgram: the graph and the exported program that it was made from."""
    require("onnx", "onnxscript", "onnx_ir")
    if isinstance(model, fx.GraphModule):
        model = with_named_inputs(model, args, kwargs)
    named = named_inputs(model, args, kwargs)
    if isinstance(model, fx.GraphModule):  # which torch.export calls without names
        args = tuple(named.values())
        kwargs = {}
    if dynamic_axes and dynamic_shapes is None:
        dynamic_shapes = shapes_from_axes(dynamic_axes, named, input_names, output_names)
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = {name: dynamic_shapes.get(name) for name in named}
    try:
        with quiet(verbose), CommonType():
            program = torch.onnx.export(
                model,
                args,
                kwargs={name: kwargs[name] for name in named if name in kwargs},
                input_names=input_names,
                output_names=output_names,
                opset_version=opset,
                dynamic_shapes=dynamic_shapes,
                dynamo=True,
                verbose=verbose,
            )
    except Exception as error:  # torch's exporter raises errors of many kinds
        raise ExportError(_explain(error, model)) from error
    assert program is not None
    register_constants(program.model.graph)
    if not output_names:
        name_outputs(program)
    return program


def name_outputs(program: Any) -> None:
    """The outputs of a model that returns a dict are called as its keys."""
    spec = program.exported_program.call_spec.out_spec
    outputs = program.model.graph.outputs
    shown = pytree.tree_unflatten(range(spec.num_leaves), spec)
    if not isinstance(shown, Mapping) or spec.num_leaves != len(outputs):
        return
    names = ["_".join(map(_key, path)) for path, _ in pytree.tree_flatten_with_path(shown)[0]]
    values = [value for node in program.model.graph.all_nodes() for value in node.outputs]
    taken = {value.name for value in program.model.graph.inputs} | set(program.model.graph.initializers)
    are_distinct = len({id(value) for value in outputs}) == len(outputs) == len(set(names))
    if not are_distinct or taken & {*names, *(value.name for value in outputs)}:
        return
    for value in values:
        if value.name in names and value not in outputs:
            value.name = f"{value.name}_inside"
    for value, name in zip(outputs, names):
        value.name = name


def _key(entry: Any) -> str:
    """A part of a path in a nested output: the key of a dict, or the place in a list."""
    found = getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))
    return str(found)


def register_constants(graph: Any) -> None:
    """Store every constant that a node reads as an initializer with a unique name.

    onnxscript names the bounds of a Clip after the value that is clipped. Two clips of one value have the same names,
    and the second pair of bounds takes the place of the first in the list of initializers.
    """
    names = {value.name for node in graph.all_nodes() for value in (*node.inputs, *node.outputs) if value}
    for value in [value for node in graph.all_nodes() for value in node.inputs if value is not None]:
        lost = value.producer() is None and value.const_value is not None
        if not lost or value.is_initializer() or value.is_graph_input():
            continue
        if value.name in graph.initializers:
            value.name = next(n for i in itertools.count(1) if (n := f"{value.name}_{i}") not in names)
            names.add(value.name)
        graph.register_initializer(value)


def require(*packages: str) -> None:
    """The packages that export needs; which extra brings them."""
    import importlib.util

    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        raise ExportError(f"export needs {', '.join(missing)}: pip install 'sparsebit[onnx]'")


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, in the order of the forward: torch.export reads keywords by their position."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        if not isinstance(model, fx.GraphModule):
            return dict(bound.arguments)
        bound.apply_defaults()
        takes = bound.signature.parameters
        return {name: value for name, value in bound.arguments.items() if takes[name].kind not in ANYTHING}
    except TypeError as error:
        raise ExportError(f"dummy_data: does not fit the forward of the model: {error}") from None


def shapes_from_axes(
    axes: Mapping[str, Any],
    named: Mapping[str, Any],
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> dict[str, Any]:
    """`{"x": {0: "batch"}}` or `{"x": [0, 2]}`, the old form -> torch.export's dynamic_shapes.

    A key is the name of an input in the file (input_names) or in the forward; names of outputs follow from these.
    """
    outside = dict(zip(named, input_names or ()))  # name in the forward -> name in the file
    unknown = [key for key in axes if key not in {*named, *outside.values(), *(output_names or ())}]
    if len(unknown) == len(axes) and not input_names and len(axes) <= len(named):
        outside = dict(zip(named, axes))  # the old exporter took any name, in order
    elif unknown and output_names:
        raise ExportError(
            f"dynamic_axes: {', '.join(unknown)} is not an input or output; inputs are "
            f"{', '.join(outside.get(name, name) for name in named)}"
        )
    return {name: _labels(axes.get(outside.get(name, name), axes.get(name)), name) for name in named}


def _labels(axes: Any, name: str) -> dict[int, Any] | None:
    if not axes:
        return None
    if isinstance(axes, Mapping):
        return {int(i): str(label) for i, label in axes.items()}
    return {int(i): f"{name}_{i}" for i in axes}


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """torch's exporter talks about packages that are not there, its own plans, and every failed attempt."""
    if verbose:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        sink = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _explain(error: BaseException, model: nn.Module) -> str:
    """The innermost reason and the module it is in, without the exporter's framing."""
    where = ""
    packed = False
    while True:
        where = _module_path(error, model) or where
        packed = packed or _is_packed(error)
        if error.__cause__ is None:
            break
        error = error.__cause__
    lines = [line for line in str(error).split("While executing")[0].splitlines() if line.strip()]
    if packed:
        what = f"packed sequences in {where}".removesuffix(" in ")
    else:
        what = where or "the model"
    fix = "write that part with other ops, or cut it off and export the rest of the model"
    if packed:
        fix = PADDED
    elif "Cache'> in output" in str(error):  # what language models of transformers keep for the next token
        fix = CACHE
    elif "grouped_mm" in str(error):  # experts of transformers
        fix = EXPERTS
    return (
        f"torch's exporter cannot translate {what}: {type(error).__name__}: {' '.join(lines[:2])[:600]}\n"
        f"  fix: {fix}"
    )


def _is_packed(error: BaseException) -> bool:
    """Was a recurrent layer of torch at work on a packed sequence, or one being made?"""
    inside = []
    for f, _ in traceback.walk_tb(error.__traceback__):
        if f.f_globals.get("__name__") in RECURRENT:
            inside.append(f)
    return any(f.f_locals.get("batch_sizes") is not None or "pack" in f.f_code.co_name for f in inside)


def _module_path(error: BaseException, model: nn.Module) -> str:
    """The path of the module whose node the exporter was at, from the frames of the error."""
    graph = getattr(model, "graph", None)
    nodes: list[fx.Node] = list(graph.nodes) if isinstance(graph, fx.Graph) else []
    paths = {str(n.target): n.meta.get("path") or n.name for n in nodes}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in ("node", "n"):
            node = frame.f_locals.get(name)
            if not isinstance(node, fx.Node):
                continue
            if node.op == "call_module":
                return str(paths.get(str(node.target), node.target))
            stack = modules_around(node)
            known = [paths[path] for path in stack if path in paths]
            if known or stack:
                return str((known or stack)[-1])
    return ""


def modules_around(node: fx.Node) -> list[str]:
    """The paths of the modules that a node of an exported program is in, the innermost last."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
