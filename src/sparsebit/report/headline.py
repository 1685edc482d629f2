"""The few figures at the top of a report: label, value, remark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparsebit.report.figures import busy, count, decibel, size

Tile = tuple[str, str, str]


def headline(command: str, steps: Any, layers: Any, profile: Any, failure: str = "") -> Iterator[Tile]:
    if failure:
        yield "Certificate", "DOES NOT HOLD", failure.partition("\n")[0]
    elif "export" in steps:
        yield "Certificate", "holds", "the file does what the model does"
    if layers is not None:
        yield from _quantized(layers, steps["quantize"].get("batch"))
    if command == "prune":
        for key, label in (("params", "Parameters"), ("macs", "MACs")):
            before, after = steps["prune"][key]
            yield label, f"{count(before)} → {count(after)}", f"{100 * after / max(before, 1):.0f} % stay"
    if "metric" in steps:
        yield _metric(steps["metric"])
    if profile is not None:
        yield "Output SQNR", decibel(profile["total"]), "everything quantized, against float"
    if "latency" in steps:
        yield _latency(steps["latency"])
    if "export" in steps:
        yield "ONNX file", size(steps["export"]["bytes"]), "has been run and compared"


def _quantized(layers: Any, batch: int | None) -> Iterator[Tile]:
    totals = layers["totals"]
    before = totals["bytes"]
    after = totals["quantized_bytes"]
    yield "Parameters", f"{size(before)} → {size(after)}", f"{100 * after / max(before, 1):.0f} % of the size"
    ops = f"{totals['quantized']} of {totals['quantized'] + totals['float']} ops"
    yield "Quantized", ops, f"{totals['absorbed']} more run inside others"
    if totals.get("macs"):
        part = 100 * totals["integer_macs"] / totals["macs"]
        of_batch = f"for a batch of {batch}; " if batch else ""
        yield "MACs", count(totals["macs"]), f"{of_batch}{part:.0f} % in integers by {layers['backend']}"


def _metric(facts: Any) -> Tile:
    before = facts["float"]
    after = facts["new"]
    samples = facts["samples"]
    label = facts["name"].capitalize()
    if not samples:
        return label, f"{before:.4g} → {after:.4g}", "before and after"
    return label, f"{before:.2f} → {after:.2f} %", f"of {samples} samples of the data it was fitted on"


def _latency(facts: Any) -> Tile:
    before = facts["milliseconds"]["float"]
    after = facts["milliseconds"]["new"]
    cores = f"{facts['cores']} core{'s' if facts['cores'] > 1 else ''} of {facts['machine']}"
    where = f"{before / after:.1f} x as fast in onnxruntime, batch of {facts['batch']}, {cores}"
    others = busy(facts.get("others"))
    where += f"; {others}" if others else ""
    return "Latency", f"{before:.3g} → {after:.3g} ms", where
