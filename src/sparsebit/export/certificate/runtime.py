"""Running a file in onnxruntime: as users do, or bare, with every value around a quantizer as an output."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.errors import ExportError
from sparsebit.export.onnx.to_onnx import require

Array = np.ndarray[Any, Any]
# ops of an optimised graph that compute in integers, beside all QLinear* and MatMulInteger*
INTEGER = frozenset(["QGemm", "QAttention", "ConvInteger", "MatMulNBits", "DynamicQuantizeMatMul"])
COMPUTE = frozenset(
    ["Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "LSTM", "GRU", "RNN"]
    + ["Add", "Mul", "AveragePool", "MaxPool", "GlobalAveragePool", "Concat", "Resize"]
    + ["Sigmoid", "LeakyRelu", "Softmax", "Tanh", "HardSigmoid", "HardSwish", "Elu", "PRelu", "Softplus"]
    + ["Gelu", "QuickGelu"]
)


def session(path: str | Path, optimised: bool = True, save: str | None = None) -> Any:
    """An onnxruntime session on the CPU as users load a file: no option has another value than its default.

    optimised   False: every optimisation is off.
    save        write the optimised graph there.
    """
    require("onnxruntime")
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised, with a reason
    level = ort.GraphOptimizationLevel
    if not optimised:
        options.graph_optimization_level = level.ORT_DISABLE_ALL
    if save:
        options.graph_optimization_level = level.ORT_ENABLE_EXTENDED  # without layouts of this very machine
        options.optimized_model_filepath = save
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes
        raise ExportError(f"{path}: onnxruntime does not load the file: {error}") from error


def feeds(loaded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Array]:
    """The inputs of a session, from the arguments of the model: by name where names agree, else in order."""
    wanted = [i.name for i in loaded.get_inputs()]
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    by_name = {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
    if not args and set(wanted) <= set(by_name):
        return {name: as_array(by_name[name]) for name in wanted}
    if len(tensors) < len(wanted):
        raise ExportError(f"the file has the inputs {wanted}, but the batch has {len(tensors)} tensors")
    return {name: as_array(t) for name, t in zip(wanted, tensors)}


def run(loaded: Any, given: dict[str, Array]) -> list[Array]:
    """The outputs of a session."""
    try:
        found: list[Array] = loaded.run(None, given)
    except Exception as error:  # onnxruntime's own classes
        raise ExportError(
            f"onnxruntime loads the file but does not run it: {error}\n"
            f"  fix: if it names a dimension, export with dynamic_axes, or give batches of the size of the dummy"
        ) from error
    return found


def as_array(x: Tensor) -> Array:
    return x.detach().cpu().numpy()


def run_bare(path: Path, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Array]:
    """The values called `names`, and the outputs, computed with every optimisation off."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    have = {o.name for o in model.graph.output}
    inputs = {i.name for i in model.graph.input}
    computed = {name for node in model.graph.node for name in node.output}
    missing = {*names} - computed - inputs - {tensor.name for tensor in model.graph.initializer}
    if missing:
        raise ExportError(
            f"{path}: has no value {', '.join(sorted(missing)[:5])}, which its metadata names; export the model again"
        )
    for name in dict.fromkeys(names):
        if name not in have and name not in inputs:
            model.graph.output.append(onnx.ValueInfoProto(name=name))
    # beside the file: external data is there
    handle, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".onnx", dir=path.parent)
    os.close(handle)
    try:
        onnx.save(model, temporary)
        bare = session(temporary, optimised=False)
        given = feeds(bare, args, kwargs)
        outputs = run(bare, given)
    finally:
        os.unlink(temporary)
    return {**given, **dict(zip([o.name for o in bare.get_outputs()], outputs))}


def kernels(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Which ops of the optimised graph compute in integers, and which compute in float."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="sparsebit-") as folder:
        file = f"{folder}/optimised.onnx"
        session(path, save=file)
        graph = onnx.load(file, load_external_data=False).graph
    integer: Counter[str] = Counter()
    floating: Counter[str] = Counter()
    codes = {n.output[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    for node in graph.node:
        if node.op_type.startswith(("QLinear", "MatMulInteger")) or node.op_type in INTEGER:
            integer[node.op_type] += 1
            if node.op_type.startswith("QLinear") or (node.op_type == "QGemm" and len(node.input) > 7):
                codes.update(node.output)  # a QGemm without a grid for its output gives floats
        elif node.input and node.input[0] in codes and node.op_type != "DequantizeLinear":
            integer[node.op_type] += node.op_type in COMPUTE
            codes.update(node.output)
        elif node.op_type in COMPUTE:
            floating[node.op_type] += 1
    return +integer, floating


def torch_outputs(value: Any) -> list[Array]:
    """The tensors of an answer; numbers with a fraction as float32."""
    found = [as_array(t) for t in pytree.tree_leaves(value) if torch.is_tensor(t)]
    result: list[Array] = []
    for x in found:
        result.append(x if x.dtype.kind in "iub" else x.astype(np.float32))
    return result
