"""What ops cost in onnxruntime on this CPU, in float and in integers: the table by which quantizers are placed.

    python benchmarks/op_costs.py --show                     # measure and print; alone on the machine, half a minute
    python benchmarks/op_costs.py --save vnni                # also write it into the package
    PYTHONPATH=build/ort_avx2 python benchmarks/op_costs.py --save avx2 --skip MatMul    # after without_vnni.py

Each case is a file with one op, once in float and once between quantizers, run in a profiled session with one thread.
The time of the kernel itself and the times of what stands around it (rounding, layouts) are kept apart. Then a few
numbers are fitted for each kind of op: microseconds for each call, for each million products and for each million
values. They are in src/sparsebit/export/backends/onnxruntime_costs.json, with the measured cases behind them.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

TABLE = Path(__file__).resolve().parent.parent / "src/sparsebit/export/backends/onnxruntime_costs.json"
RNG = np.random.default_rng(0)
RUNS = 25
STEP, ZERO = np.float32(0.05), np.uint8(128)
LAYOUTS = ("Transpose", "ReorderInput", "ReorderOutput")


@dataclass
class Case:
    """One op. `kind` is its row in the table; `features` are what its time depends on, in millions."""

    kind: str
    op: str
    shapes: list[tuple[int, ...]]
    features: dict[str, float]
    weight: tuple[int, ...] | None = None
    weight_axis: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    steps: int = 1  # how many quantizers of the same grid on both sides


def conv(
    kind: str, inputs: int, outputs: int, kernel: int, size: int, stride: int = 1, groups: int = 1
) -> Case:
    out = -(-size // stride)
    products = out * out * outputs * (inputs // groups) * kernel * kernel
    features = {
        "products": products / 1e6,
        "gathered": out * out * inputs * kernel * kernel / 1e6,
        "values": out * out * outputs / 1e6,
    }
    options = {
        "kernel_shape": [kernel] * 2,
        "pads": [kernel // 2] * 4,
        "strides": [stride] * 2,
        "group": groups,
    }
    weight = (outputs, inputs // groups, kernel, kernel)
    return Case(kind, "Conv", [(1, inputs, size, size)], features, weight, 0, options)


def gemm(rows: int, inputs: int, outputs: int) -> Case:
    features = {
        "products": rows * inputs * outputs / 1e6,
        "gathered": rows * inputs / 1e6,
        "values": rows * outputs / 1e6,
    }
    return Case("Gemm", "MatMul", [(rows, inputs)], features, (inputs, outputs), 1)


def attention(heads: int, rows: int, width: int) -> Case:
    features = {"products": heads * rows * rows * width / 1e6, "values": heads * rows * rows / 1e6}
    return Case("MatMul", "MatMul", [(heads, rows, width), (heads, width, rows)], features)


def values(kind: str, op: str, shape: tuple[int, ...], *more: tuple[int, ...], **options: Any) -> Case:
    domain = options.pop("domain", "")
    return Case(
        kind,
        op,
        [(1, *shape), *((1, *other) for other in more)],
        {"values": np.prod(shape) / 1e6},
        options=options,
        domain=domain,
    )


SHAPES = [(16, 112, 112), (96, 28, 28), (256, 14, 14)]


def cases() -> Iterator[Case]:
    for inputs, outputs, size in ((16, 96, 56), (96, 24, 56), (64, 256, 28), (64, 384, 14), (384, 64, 14)):
        yield conv("Conv 1x1", inputs, outputs, 1, size)
    for inputs, outputs, size in ((960, 160, 7), (32, 16, 112), (128, 128, 28)):
        yield conv("Conv 1x1", inputs, outputs, 1, size)
    for inputs, outputs, size in ((16, 16, 56), (32, 32, 56), (64, 64, 56), (128, 128, 28), (256, 256, 14)):
        yield conv("Conv", inputs, outputs, 3, size)
    yield conv("Conv", 64, 128, 3, 56, 2)
    yield conv("Conv", 128, 192, 5, 14)
    for inputs, outputs, kernel in ((3, 16, 3), (3, 32, 3), (3, 64, 7), (3, 48, 4), (1, 16, 3), (4, 24, 5)):
        yield conv("Conv of few channels", inputs, outputs, kernel, 224, 2)
    for channels, kernel, size, stride in ((96, 3, 56, 2), (384, 3, 14, 1), (672, 5, 14, 1), (96, 7, 28, 1)):
        yield conv("Conv depthwise", channels, channels, kernel, size, stride, channels)
    for channels, kernel, size, stride in ((32, 3, 112, 1), (240, 5, 28, 2), (192, 7, 14, 1), (960, 3, 7, 1)):
        yield conv("Conv depthwise", channels, channels, kernel, size, stride, channels)
    for width in (4, 8, 16, 32, 64):
        for groups, size in ((4, 28), (8, 14), (16, 28)):
            yield conv(f"Conv in groups of {width}", width * groups, width * groups, 3, size, 1, groups)
    for channels, kernel, size in ((48, 7, 28), (32, 3, 56)):
        yield conv("Conv of several filters", channels, 2 * channels, kernel, size, 1, channels)
    for rows, inputs, outputs in (
        (197, 192, 768),
        (197, 768, 192),
        (64, 384, 384),
        (1, 1280, 1000),
        (128, 384, 1536),
    ):
        yield gemm(rows, inputs, outputs)
    for heads, rows, width in ((3, 197, 64), (12, 128, 32), (6, 64, 64)):
        yield attention(heads, rows, width)
    for shape in SHAPES:
        yield values("Add", "Add", shape, shape)
        yield values("Mul", "Mul", shape, shape)
        yield values("Mul by channel", "Mul", shape, (shape[0], 1, 1))
        yield values("Concat", "Concat", shape, shape, axis=1)
        yield values("Sigmoid", "Sigmoid", shape)
        yield values("LeakyRelu", "LeakyRelu", shape, alpha=0.1)
        yield values("MaxPool", "MaxPool", shape, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
        yield values("GlobalAveragePool", "GlobalAveragePool", shape)
        # ops without an integer form: in integers they are Dequantize, the float op, Quantize
        yield values("HardSwish", "HardSwish", shape)
        yield values("HardSigmoid", "HardSigmoid", shape, alpha=1 / 6, beta=0.5)
        yield values("Gelu", "Gelu", shape, domain="com.microsoft")
        yield values("Tanh", "Tanh", shape)
        yield values("Resize", "Resize", shape, mode="nearest", scales=2)
    yield values("Softmax", "Softmax", (3, 197, 197), axis=-1)
    yield values("Softmax", "Softmax", (12, 128, 128), axis=-1)
    yield values("LayerNorm", "LayerNormalization", (197, 192), axis=-1)
    yield values("LayerNorm", "LayerNormalization", (196, 384), axis=-1)


def built(case: Case, quantized: bool) -> bytes:
    """Float inputs and outputs in both forms: what stands around the kernel is measured, too."""
    nodes: list[Any] = []
    constants: list[Any] = []

    def constant(value: Any, name: str) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    grid = [constant(STEP, "step"), constant(ZERO, "zero")] if quantized else []

    def rounded(x: str) -> str:
        if not quantized:
            return x
        nodes.append(helper.make_node("QuantizeLinear", [x, *grid], [f"{x}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{x}_q", *grid], [f"{x}_d"]))
        return f"{x}_d"

    inputs = [
        helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape)
        for i, shape in enumerate(case.shapes)
    ]
    operands = [rounded(f"x{i}") for i in range(len(case.shapes))]
    if case.weight is not None:
        count, axis = case.weight[case.weight_axis], case.weight_axis
        codes = np.clip(np.round(RNG.normal(0, 40, case.weight)), -127, 127).astype(np.int8)
        scale = np.full(count, 0.02 / np.sqrt(np.prod(case.weight) / count), np.float32)
        if quantized:
            stored = [
                constant(codes, "w"),
                constant(scale, "ws"),
                constant(np.zeros(count, np.int8), "wz"),
            ]
            nodes.append(helper.make_node("DequantizeLinear", stored, ["weight"], axis=axis))
            operands.append("weight")
        else:
            operands.append(constant((codes * scale[0]).astype(np.float32), "weight"))
    options = dict(case.options)
    if case.op == "Resize":
        operands += [
            "",
            constant(np.array([1, 1, options["scales"], options.pop("scales")], np.float32), "s"),
        ]
        options["nearest_mode"] = "floor"
    if case.op == "LayerNormalization":
        operands.append(constant(np.ones(case.shapes[0][-1], np.float32), "g"))
    nodes.append(helper.make_node(case.op, operands, ["out"], domain=case.domain, **options))
    last = rounded("out")
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", inputs, [made], constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return bytes(model.SerializeToString())


def profiled(model: bytes, case: Case) -> list[tuple[str, float, int]]:
    """(kernel, microseconds, values it writes) of every node of the optimised graph."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.enable_profiling = 1, 4, True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder, "p"))
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        given = {f"x{i}": RNG.normal(0, 2, shape).astype(np.float32) for i, shape in enumerate(case.shapes)}
        for _ in range(RUNS):
            session.run(None, given)
        events = json.loads(Path(session.end_profiling()).read_text())
    best: dict[str, tuple[str, float, int]] = {}
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        args = event["args"]
        key = f"{args['node_index']} {event['name']}"
        shapes = args.get("output_type_shape", [])
        count = int(np.prod(next(iter(shapes[0].values())))) if shapes else 0
        old = best.get(key, ("", np.inf, 0))
        best[key] = (args["op_name"], min(old[1], float(event["dur"])), count)
    return list(best.values())


def measured(case: Case) -> dict[str, Any]:
    """Kernel times of both forms, and the borders that were seen."""
    row: dict[str, Any] = {"kind": case.kind, "features": case.features}
    borders: list[tuple[str, float, int]] = []
    for form, quantized in (("float", False), ("integer", True)):
        found = profiled(built(case, quantized), case)
        names = {name for name, _, _ in found}
        has_kernel = any(name.startswith("QLinear") or name == "QGemm" for name in names)
        total = 0.0
        for name, time, count in found:
            is_border = name in LAYOUTS or (name in ("QuantizeLinear", "DequantizeLinear"))
            if is_border:
                borders.append(
                    (f"{name} of codes" if name == "Transpose" and quantized else name, time, count)
                )
            else:
                total += time
        row[form] = total
        row[f"{form}_kernels"] = sorted(names)
        if quantized:
            moves = case.op in ("MaxPool", "Resize")
            row["has_kernel"] = has_kernel or moves
    row["borders"] = borders
    return row


def fitted(rows: list[dict[str, Any]], form: str) -> dict[str, float]:
    """Numbers that are not negative, with the least relative error: microseconds by call and by million."""
    names = sorted({name for row in rows for name in row["features"]})
    wanted = np.array([max(row[form], 1.0) for row in rows])
    matrix = np.array([[1.0, *(row["features"].get(name, 0.0) for name in names)] for row in rows])
    found = nonnegative(matrix / wanted[:, None], np.ones(len(rows)))
    return {
        name: float(f"{value:.4g}") for name, value in zip(["call", *names], found) if value or name == "call"
    }


def nonnegative(matrix: Any, wanted: Any) -> Any:
    """Least squares over all sets of columns whose solution is not negative."""
    best, solution = np.inf, np.zeros(matrix.shape[1])
    for chosen in range(1, 2 ** matrix.shape[1]):
        columns = [i for i in range(matrix.shape[1]) if chosen >> i & 1]
        if len(columns) > len(matrix):
            continue
        values, *_ = np.linalg.lstsq(matrix[:, columns], wanted, rcond=None)
        error = float(np.square(matrix[:, columns] @ values - wanted).sum())
        if (values >= 0).all() and error < best - 1e-9:
            best, solution = error, np.zeros(matrix.shape[1])
            solution[columns] = values
    return solution


def table(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By kind of op: the numbers of the float and of the integer kernel; by kind of border: its numbers."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    borders: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
        for name, time, count in row["borders"]:
            if count > 1000:
                borders[name].append({"features": {"values": count / 1e6}, "time": time})
    ops: dict[str, dict[str, dict[str, float]]] = {}
    for kind, found in kinds.items():
        ops[kind] = {"float": fitted(found, "float")}
        if all(row["has_kernel"] for row in found):
            ops[kind]["integer"] = fitted(found, "integer")
    around = {name: fitted(found, "time") for name, found in sorted(borders.items())}
    return {"ops": ops, "borders": around}  # type: ignore[dict-item]


def predicted(numbers: dict[str, float], features: dict[str, float]) -> float:
    return numbers.get("call", 0.0) + sum(numbers.get(name, 0.0) * value for name, value in features.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", choices=["vnni", "avx2"], help="the part of the table to write")
    parser.add_argument("--skip", nargs="+", default=[], help="kinds that the stand-in of a CPU cannot run")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--cpu", default=platform.processor() or platform.machine(), help="its name")
    args = parser.parse_args()
    rows = [measured(case) for case in cases() if case.kind not in args.skip]
    found = table(rows)
    for row in rows if args.show else ():
        numbers = found["ops"][row["kind"]]
        shown = [
            f"{form} {row[form]:7.0f} ({predicted(numbers[form], row['features']):7.0f})"  # type: ignore[arg-type]
            if form in numbers
            else ""
            for form in ("float", "integer")
        ]
        features = {name: round(value, 3) for name, value in row["features"].items()}
        print(f"{row['kind']:26} {'  '.join(shown)}  {row['integer_kernels']} {features}")
    print(json.dumps(found["borders"], indent=1))
    if args.save:
        everything = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        everything[args.save] = {"cpu": args.cpu, "onnxruntime": ort.__version__, **found}
        TABLE.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
