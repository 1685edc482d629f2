"""Depthwise-separable chains in onnxruntime: all float, all integer, and float between integer products of 1 x 1.

    python benchmarks/float_forms.py [--act silu|hardswish] [--batch 1] [--threads 1]
    PYTHONPATH=build/ort_avx2 python benchmarks/float_forms.py     # after benchmarks/without_vnni.py build/ort_avx2

One row per width and size: microseconds of three pairs (convolution of 1 x 1, activation, depthwise 3 x 3, activation).

float      as a float model
integer    QLinearConv, and the activation as a table and a product (converters/open_gates.py)
product    the 1 x 1 as an integer Gemm with float output; activation and depthwise in float (converters/float_forms.py)
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

SHAPES = ((24, 104), (64, 52), (128, 28), (192, 14))  # channels, height and width
PAIRS, ROUNDS = 3, 25
FORMS = ("float", "integer", "product")
RNG = np.random.default_rng(0)
STEP, ZERO = np.float32(0.05), np.uint8(128)


class Chain:
    """One file, made node by node."""

    def __init__(self, form: str, act: str, channels: int, size: int, batch: int):
        self.form, self.act, self.channels, self.shape = form, act, channels, (batch, channels, size, size)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        x = "x"
        for _ in range(PAIRS):
            x = self.activation(self.pointwise(x))
            x = self.activation(self.depthwise(x))
        self.node("Identity", [x], "out")

    def node(self, op: str, inputs: list[str], name: str = "", domain: str = "", **options: Any) -> str:
        name = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], domain=domain, **options))
        return name

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def rounded(self, x: str) -> str:
        grid = [self.constant(STEP), self.constant(ZERO)]
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *grid]), *grid])

    def weight(self, *shape: int, axis: int) -> str:
        codes = RNG.integers(-60, 60, shape).astype(np.int8)
        scale = (RNG.uniform(0.5, 1.5, self.channels) * 0.02 / self.channels**0.5).astype(np.float32)
        zero = np.zeros(self.channels, np.int8)
        stored = [self.constant(value) for value in (codes, scale, zero)]
        return self.node("DequantizeLinear", stored, axis=axis)

    def pointwise(self, x: str) -> str:
        c = self.channels
        if self.form == "float":
            weight = self.constant(RNG.normal(0, c**-0.5, (c, c, 1, 1)).astype(np.float32))
            return self.node("Conv", [x, weight], kernel_shape=[1, 1])
        x = x if self.form == "integer" and x != "x" else self.rounded(x)
        if self.form == "integer":
            return self.rounded(self.node("Conv", [x, self.weight(c, c, 1, 1, axis=0)], kernel_shape=[1, 1]))
        rows = self.node("Transpose", [x], perm=[0, 2, 3, 1])
        rows = self.node("Reshape", [rows, self.constant(np.array([-1, c]))])
        rows = self.node("Gemm", [rows, self.weight(c, c, axis=1)])
        size = self.shape[-1]
        images = self.node("Reshape", [rows, self.constant(np.array([-1, size, size, c]))])
        return self.node("Transpose", [images], perm=[0, 3, 1, 2])

    def depthwise(self, x: str) -> str:
        options = {"kernel_shape": [3, 3], "pads": [1] * 4, "group": self.channels}
        if self.form == "integer":
            return self.rounded(
                self.node("Conv", [x, self.weight(self.channels, 1, 3, 3, axis=0)], **options)
            )
        weight = RNG.normal(0, 0.3, (self.channels, 1, 3, 3)).astype(np.float32)
        return self.node("Conv", [x, self.constant(weight)], **options)

    def activation(self, x: str) -> str:
        slope = {"alpha": 1 / 6, "beta": 0.5} if self.act == "hardswish" else {}
        if (
            self.form == "integer" and self.act == "hardswish"
        ):  # a table, as export/onnx/integer_forms.py writes it
            gate = self.node("LeakyRelu", [x], alpha=1.0)
        else:
            gate = self.node("HardSigmoid" if slope else "Sigmoid", [x], **slope)
        if self.form == "integer":
            return self.rounded(self.node("Mul", [x, self.rounded(gate)]))
        return self.node("Mul", [x, gate])

    def session(self, threads: int) -> Any:
        info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, self.shape) for n in ("x", "out")]
        graph = helper.make_graph(self.nodes, "chain", info[:1], info[1:], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--act", choices=["silu", "hardswish"], default="silu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print(f"{'channels, size':16}" + "".join(f"{form:>10}" for form in FORMS))
    for channels, size in SHAPES:
        sessions = {f: Chain(f, args.act, channels, size, args.batch).session(args.threads) for f in FORMS}
        x = RNG.normal(size=(args.batch, channels, size, size)).astype(np.float32)
        best = dict.fromkeys(FORMS, float("inf"))
        for _ in range(ROUNDS):
            for form, session in sessions.items():
                for _ in range(3):
                    start = time.perf_counter()
                    session.run(None, {"x": x})
                    best[form] = min(best[form], (time.perf_counter() - start) * 1e6)
        print(f"{channels:4} x {size:<9}" + "".join(f"{best[form]:10.0f}" for form in FORMS), flush=True)


if __name__ == "__main__":
    main()
