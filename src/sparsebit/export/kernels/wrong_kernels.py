"""Kernels of onnxruntime that compute something else than the graph, each with a probe.

A probe builds a tiny file and runs it twice on this machine: with all optimisations, and with none. Placement avoids
the listed kernels. A defect of the runtime is no longer listed once its probe passes with the installed version. A
defect that depends on the CPU stays listed everywhere, because a file is used on other machines than the one that wrote
it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class WrongKernel:
    kernel: str  # op type in the optimised graph
    what: str
    avoided: str  # what placement does about it
    probe: Callable[[], bool]  # True: it computes wrongly here
    seen_in: str = "1.31.1"  # version of onnxruntime
    depends_on_cpu: bool = False


def _session(model: Any, optimised: bool) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _differs(nodes: list[Any], tensors: list[Any], x: Array, opset: int, allowed: float) -> bool:
    """Is the optimised output further away than `allowed`, as a share of the largest value?"""
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        tensors,
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=13 if opset > 21 else 9)
    (got,), (want,) = (_session(model, optimised).run(None, {"x": x}) for optimised in (True, False))
    return bool(np.abs(got - want).max() > allowed * np.abs(want).max())


def _softmax_is_wrong() -> bool:
    """Sixteen probabilities of about 1/16, whose scale is 0.07 / 255; and some near 1, whose scale is 1 / 255."""
    return any(_softmax_differs(spread, largest) for spread, largest in ((0.05, 0.07), (3.0, 1.0)))


def _softmax_differs(spread: float, largest: float) -> bool:
    from onnx import helper, numpy_helper

    scale = np.float32(largest / 255)
    scalars = {"xs": np.float32(0.1), "xz": np.uint8(128), "ys": scale, "yz": np.uint8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("Softmax", ["xd"], ["p"], axis=-1),
        helper.make_node("QuantizeLinear", ["p", "ys", "yz"], ["pq"]),
        helper.make_node("DequantizeLinear", ["pq", "ys", "yz"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in scalars.items()]
    x = np.random.default_rng(0).normal(0, spread, (16, 16)).astype(np.float32)
    return _differs(nodes, tensors, x, 17, allowed=0.5 / 255)


def _two_bit_product_is_wrong() -> bool:
    """A weight of 2 bits with 17 outputs: a number that four does not divide."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    codes = rng.integers(-2, 2, (96, 17)).flatten().tolist()
    weight = helper.make_tensor("w", TensorProto.INT2, [96, 17], codes)
    scale = numpy_helper.from_array(np.ones((3, 17), np.float32), "s")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"], axis=0, block_size=32),
        helper.make_node("MatMul", ["x", "wd"], ["y"]),
    ]
    x = rng.normal(size=(4, 96)).astype(np.float32)
    return _differs(nodes, [weight, scale], x, 25, allowed=0.1)


@functools.cache
def cuts_sums() -> bool:
    """Does onnxruntime cut sums on this CPU? Without VNNI, x86 adds two products of uint8 and int8 in 16 bits."""
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.full((64, 16), 127, np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 16])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (found,) = _session(model, optimised=True).run(None, {"x": np.full((1, 64), 255, np.uint8)})
    return bool((found != 64 * 127 * 255).any())


WRONG_KERNELS = (
    WrongKernel(
        "QLinearSoftmax",
        "probabilities are wrong where the largest of a tensor is small (0.07), or the axis is not the last one",
        "softmax stays float: its input has no quantizer",
        _softmax_is_wrong,
    ),
    WrongKernel(
        "MatMulNBits",
        "products with 2-bit weights are wrong where four does not divide the number of outputs",
        "such weights are stored in 4 bits",
        _two_bit_product_is_wrong,
    ),
    WrongKernel(
        "QLinearConv, QGemm, QLinearMatMul, MatMulIntegerToFloat",
        "x86 without VNNI adds two products of uint8 and int8 in 16 bits, and cuts the sum",
        "weights follow the pair rule (W.PAIR_RULE), under which no sum of two products is too large",
        cuts_sums,
        depends_on_cpu=True,
    ),
)


@functools.cache
def is_wrong(kernel: str) -> bool:
    """Must placement avoid `kernel`? Where onnxruntime is not installed, every listed kernel counts as wrong."""
    entry = next(found for found in WRONG_KERNELS if kernel in found.kernel.split(", "))
    missing = any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime"))
    return missing or entry.depends_on_cpu or entry.probe()
