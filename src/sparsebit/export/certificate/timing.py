"""How long files take in plain sessions of onnxruntime, and in which ops.

Files run in turns and the best round of each counts, so that other work on the machine costs all of them the same. The
times of single ops come from onnxruntime's own profiler.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsebit.export.certificate.runtime import INTEGER, Array, run, session

SECONDS = 2.0  # for all files together
ROUNDS = 50  # at most
RUNS = 3  # of a file in its turn
PROFILED = 5  # runs, of which the best one of each op counts
BORDERS = ("QuantizeLinear", "DequantizeLinear", "Transpose", "ReorderInput", "ReorderOutput", "Cast")
SHOWN = 5  # ops that a report names
# what the optimiser appends to the name of a node
SUFFIX = re.compile(r"(_token_\d+|_nchwc|_quant|_fused)+$")


def best_times(files: Mapping[str, Path], given: Mapping[str, dict[str, Array]]) -> dict[str, float]:
    """Milliseconds of one run, by name of the file."""
    sessions = {name: session(file) for name, file in files.items()}
    best = dict.fromkeys(files, math.inf)
    for name, loaded in sessions.items():
        run(loaded, given[name])  # memory is laid out in the first run
    for _ in _rounds():
        for name, loaded in sessions.items():
            for _ in range(RUNS):  # the first one finds the caches full of the file before
                start = time.perf_counter()
                run(loaded, given[name])
                best[name] = min(best[name], (time.perf_counter() - start) * 1000)
    return best


def _rounds() -> Iterator[int]:
    started = time.perf_counter()
    for i in range(ROUNDS):
        if i >= 2 and time.perf_counter() - started > SECONDS:
            return
        yield i


@dataclass(frozen=True)
class OpTime:
    """One op of the optimised graph."""

    node: str  # its name in the file
    op: str  # the kernel
    microseconds: float
    macs: int
    integer: bool


@dataclass
class Timing:
    """The time of a file, beside that of the float file, and the ops that it is made of."""

    milliseconds: float
    float_milliseconds: float | None = None
    ops: list[OpTime] = field(default_factory=list)  # the longest first
    modules: dict[str, str] = field(default_factory=dict)  # by node: the layer of the model

    @property
    def integer_time(self) -> float:
        """The share of the time that is spent in integer kernels."""
        return _share([op.microseconds for op in self.ops], [op.integer for op in self.ops])

    @property
    def integer_macs(self) -> float:
        """The share of the multiplications that integer kernels do."""
        return _share([op.macs for op in self.ops], [op.integer for op in self.ops])

    @property
    def borders(self) -> float:
        """The share of the time that is spent between integers and floats, and between layouts."""
        return _share([op.microseconds for op in self.ops], [op.op in BORDERS for op in self.ops])

    def lines(self, why_float: Mapping[str, str]) -> list[str]:
        """For people: the times, the shares, and the ops that take longest."""
        beside = ""
        if self.float_milliseconds is not None:
            ratio = self.milliseconds / self.float_milliseconds
            beside = f", the float file {self.float_milliseconds:.3g} ms ({ratio:.2f} x its time)"
        found = [
            f"{self.milliseconds:.3g} ms a run{beside}",
            f"{self.integer_time:.0%} of it in integer kernels, {self.borders:.0%} between integers and floats; "
            f"{self.integer_macs:.0%} of the MACs in integers",
        ]
        total = sum(op.microseconds for op in self.ops) or 1.0
        for op in self.ops[:SHOWN]:
            found.append(f"{op.microseconds / total:>4.0%} {self.describe(op, why_float)}")
        return found

    def describe(self, op: OpTime, why_float: Mapping[str, str]) -> str:
        where = self.modules.get(op.node) or op.node
        if op.integer:
            return f"{where} ({op.op}): integer"
        why = next((why for name, why in why_float.items() if name.startswith(f"{where} (")), "")
        if not why and op.op in BORDERS:
            why = "a border between integers and floats, or between layouts"
        return f"{where} ({op.op}): float" + (f", because {why}" if why else "")

    def as_dict(self, why_float: Mapping[str, str]) -> dict[str, Any]:
        most = [{**asdict(op), "about": self.describe(op, why_float)} for op in self.ops[:SHOWN]]
        return {
            "milliseconds": self.milliseconds,
            "float_milliseconds": self.float_milliseconds,
            "integer_time": self.integer_time,
            "integer_macs": self.integer_macs,
            "borders": self.borders,
            "most": most,
        }


def timing_of(path: Path, given: dict[str, Array], plain: Path | None = None) -> Timing:
    """Time `path`, and the float file `plain` beside it."""
    files = {"new": path} | ({} if plain is None else {"float": plain})
    best = best_times(files, dict.fromkeys(files, given))
    return Timing(best["new"], best.get("float"), *profile(path, given))


def profile(path: Path, given: dict[str, Array]) -> tuple[list[OpTime], dict[str, str]]:
    """The ops of the optimised graph, the longest first, and the layer that each comes from."""
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_profiling = True
    with tempfile.TemporaryDirectory(prefix="sparsebit-") as folder:
        options.profile_file_prefix = str(Path(folder, "times"))
        loaded = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for _ in range(PROFILED):
            run(loaded, given)
        events = json.loads(Path(loaded.end_profiling()).read_text("utf-8"))
    graph = onnx.load(str(path), load_external_data=False).graph
    per_value = _products_per_value(graph)
    best: dict[str, float] = defaultdict(lambda: math.inf)
    seen: dict[str, dict[str, Any]] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") != "Node" or not name.endswith("_kernel_time"):
            continue
        key = f"{event['args'].get('node_index', '')} {name}"
        best[key] = min(best[key], float(event["dur"]))
        seen[key] = event
    found = [_op_time(seen[key], microseconds, per_value) for key, microseconds in best.items()]
    return sorted(found, key=lambda op: -op.microseconds), _modules(graph)


def _op_time(event: dict[str, Any], microseconds: float, per_value: Mapping[str, int]) -> OpTime:
    args = event["args"]
    node = SUFFIX.sub("", str(event["name"]).removesuffix("_kernel_time"))
    inputs = args.get("input_type_shape", [])
    outputs = args.get("output_type_shape", [])
    op = str(args.get("op_name", ""))
    is_kernel = op.startswith(("QLinear", "MatMulInteger")) or op in INTEGER
    moves_codes = bool(inputs) and next(iter(inputs[0]), "") in ("uint8", "int8") and op not in BORDERS
    values = math.prod(next(iter(outputs[0].values()))) if outputs else 0
    products = per_value.get(node, 0)
    if "MatMul" in op and not products and inputs:
        products = next(iter(inputs[0].values()), [0])[-1:][0]
    return OpTime(node, op, microseconds, values * products, is_kernel or moves_codes)


def _products_per_value(graph: Any) -> dict[str, int]:
    """The number of products that make one value of the output, for each node with a weight."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    made = {output: node for node in graph.node for output in node.output}
    found = {}
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.input) < 2:
            continue
        name = node.input[1]
        while name not in shapes and name in made and made[name].input:  # codes behind DequantizeLinear
            name = made[name].input[0]
        shape = shapes.get(name)
        if not shape:
            continue
        if node.op_type == "Conv":
            found[node.name] = math.prod(shape[1:])
        elif node.op_type == "Gemm":
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            found[node.name] = shape[1] if transposed else shape[0]
        else:
            found[node.name] = shape[-2] if len(shape) > 1 else shape[0]
    return found


def _modules(graph: Any) -> dict[str, str]:
    """The layer of the model that each node comes from, as the exporter has recorded it."""
    from sparsebit.export.onnx.graph_edit import MODULE

    found: dict[str, str] = {}
    for node in graph.node:
        for entry in node.metadata_props:
            if entry.key == MODULE and entry.value:
                found[node.name] = entry.value
    return found


def _share(values: list[Any], counts: list[bool]) -> float:
    total = sum(values)
    if total:
        return sum(value for value, counted in zip(values, counts) if counted) / total
    return 0.0
