"""The graph that onnxruntime makes of a file, and the first tensor in it that is computed wrongly.

The optimised graph is written out, every tensor of it becomes an output, and it runs beside the file without
optimisations. Tensors keep their names, so the first one whose values jump apart belongs to the kernel at fault.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparsebit.export.certificate import runtime
from sparsebit.export.certificate.runtime import Array
from sparsebit.export.kernels.wrong_kernels import WRONG_KERNELS
from sparsebit.graph.run.calls import Call

JUMP = 10.0  # dB: so far above its inputs, a tensor was computed wrongly
AUDIBLE = (-40.0, -60.0, -80.0)  # dB: the loudest jumps first; below the last one it is rounding


def optimised(file: Path) -> Any:
    """The optimised graph as an onnx ModelProto, without layouts of this very machine."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="sparsebit-") as folder:
        saved = f"{folder}/optimised.onnx"
        runtime.session(file, save=saved)
        return onnx.load(saved)


def first_wrong_tensor(file: Path, calls: list[Call]) -> str:
    """The place where a plain session starts to differ from the file without optimisations, and the remedy."""
    import onnx

    model = optimised(file)
    known = set()
    for node in onnx.load(str(file), load_external_data=False).graph.node:
        for name in node.output:
            known.add(name)
    shared = []
    for node in model.graph.node:
        for name in node.output:
            if name in known:
                shared.append(name)
    with tempfile.TemporaryDirectory(prefix="sparsebit-") as folder:
        copy = Path(folder) / "optimised.onnx"
        onnx.save(model, str(copy))
        runs = []
        for call in calls:
            runs.append((runtime.run_bare(file, shared, *call), runtime.run_bare(copy, shared, *call)))
    for audible in AUDIBLE:
        for expected, got in runs:
            found = _first_jump(model, expected, got, audible)
            if found:
                return found
    return "no single tensor: small differences add up" if shared else ""


def _first_jump(model: Any, expected: dict[str, Array], got: dict[str, Array], audible: float) -> str:
    noises: dict[str, float] = {}
    for node in model.graph.node:
        before = max((noises[name] for name in node.input if name in noises), default=float("-inf"))
        here = before
        for name in node.output:
            if name not in expected or name not in got:
                noises[name] = before
                continue
            noises[name] = here = _noise_db(expected[name], got[name])
            if here > audible and here > before + JUMP:
                guilty = _computed_by(node, model, expected)
                where = name if guilty is node else guilty.output[0]
                return f"{where} ({guilty.op_type}): {here:.0f} dB from what the graph asks for{_mend(guilty.op_type)}"
    return ""


def _computed_by(node: Any, model: Any, compared: dict[str, Array]) -> Any:
    """The kernel at fault: this one, or one in front of it whose values have no name in the file.

    Of several, one whose probe fails on this machine; else the one in front of ops that only move values.
    """
    from sparsebit.export.onnx.rewrites import MOVERS

    made_by = {}
    for other in model.graph.node:
        for name in other.output:
            made_by[name] = other
    known = next((n for n in _in_front(node, made_by, compared) if _fails_its_probe(n.op_type)), None)
    if known is not None:
        return known
    while node.op_type in MOVERS and node.input[0] in made_by and node.input[0] not in compared:
        node = made_by[node.input[0]]
    return node


def _in_front(node: Any, made_by: dict[str, Any], compared: dict[str, Array]) -> Iterator[Any]:
    """The node, and those in front of it up to the values that were compared."""
    waiting: list[Any] = [node]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        yield node
        for name in node.input:
            if name in made_by and name not in compared and name not in seen:
                seen.add(name)
                waiting.append(made_by[name])


def _fails_its_probe(kernel: str) -> bool:
    return any(kernel in entry.kernel.split(", ") and entry.probe() for entry in WRONG_KERNELS)


def _noise_db(expected: Array, got: Array) -> float:
    """The noise of codes or of values in dB, against the spread of the expected ones."""
    if expected.shape != got.shape:
        return float("inf")
    a = expected.astype(np.float64)
    b = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        noise = float(np.nansum((a - b) ** 2))
        signal = float(np.nansum((a - np.nanmean(a)) ** 2))
    if not noise:
        return float("-inf")
    if signal:
        return float(10 * np.log10(noise / signal))
    return float("inf")


def _mend(kernel: str) -> str:
    for entry in WRONG_KERNELS:
        if kernel in entry.kernel.split(", "):
            return f"; known of {kernel}: {entry.what}; {entry.avoided}"
    return "; leave the layers around it in float (SPECIFIC: QUANTIZER.DISABLE), or report the kernel to onnxruntime"
