"""The facts of a checkpoint of `sparsebit llm quantize`, from its run.json and the sizes of its files.

The error of a layer is noted as the share of its output's energy, so its SQNR is -10 log10 of that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebit.report.facts import HURT_MOST, Facts, Layer
from sparsebit.report.figures import decibel, size

PERPLEXITY = "Perplexity"
SAID = re.compile(r"^(runs|fits its rules|refused|failed)[,: ]*")  # words that repeat the state
STATES = {
    "runs": "runs",
    "fits": "fits its rules",
    "refused": "refuses it",
    "failed": "FAILS",
    "unknown": "not tried",
}


def llm_facts(folder: Path, about: dict[str, Any], version: str) -> Facts:
    facts = Facts(folder.resolve().name, "llm quantize", version, settings=about["run"])
    method = about["run"]["method"]
    facts.layers = [_layer(name, method, row) for name, row in about["layers"].items()]
    if not (folder / "config.json").is_file():
        facts.todo.append("This run is not finished: repeat its command with --resume.")
    facts.headline = list(_headline(folder, about))
    facts.alarming = tuple(_alarming(about))
    facts.warning = about.get("warning", "")
    facts.todo += list(_worst(facts.layers))
    facts.notes = [f"{name}: {row['note']}" for name, row in about["layers"].items() if "note" in row]
    return facts


def _layer(name: str, method: str, row: dict[str, Any]) -> Layer:
    error = row.get("error")
    if error is None:
        own = None
    elif error > 0:
        own = -10 * math.log10(error)
    else:
        own = math.inf
    zeros = ""
    if "sparsity" in row:
        zeros = f", {row['sparsity']:.0%} zeros"
    found = Layer(name, name, "Linear", "quantized", method, f"W{row['bits']}", f"{method}{zeros}", own=own)
    found.bytes, found.quantized_bytes = row.get("bytes", (0, 0))
    return found


def _headline(folder: Path, about: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    measured = about.get("measured")
    if measured:
        before, after, kl = (float(measured[key]) for key in ("before", "after", "kl"))
        held = "held-back" if measured["apart"] else "calibration"
        remark = f"KL to float {kl:.3g} nats, on {measured['tokens']} {held} tokens"
        yield PERPLEXITY, f"{before:.4g} → {after:.4g}", remark
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    before = about.get("float_bytes", 0)
    after = sum(files)
    grown = ""
    if before:
        grown = f"{100 * after / before:.0f} % of the size; "
    if before:
        sizes = f"{size(before)} → {size(after)}"
    else:
        sizes = size(after)
    yield "Checkpoint", sizes, f"{grown}{len(files)} files, {about['run']['format']}"
    for row in about.get("readers", ()):
        name = f"{row['reader']} {row['version']}".strip()
        yield name, STATES.get(row["state"], row["state"]), SAID.sub("", row["text"])
    widths = Counter(row["bits"] for row in about["layers"].values())
    text = ", ".join(f"{n} at {bits} bits" for bits, n in sorted(widths.items()))
    yield "Layers", str(sum(widths.values())), text


def _alarming(about: dict[str, Any]) -> Iterator[str]:
    """Labels of the headline that tell of something bad."""
    if about.get("warning"):
        yield PERPLEXITY
    for row in about.get("readers", ()):
        if row["state"] == "failed":
            yield f"{row['reader']} {row['version']}".strip()


def _worst(layers: list[Layer]) -> Iterator[str]:
    known = sorted((x for x in layers if x.own is not None), key=lambda x: x.own or 0)[:HURT_MOST]
    for x in known:
        yield f"{x.name} changed most: {decibel(x.own)} at {x.bits[1:]} bits."
    if known:
        yield "Give such layers more bits than others: `--candidate-bits 2,3,4,8 --average-bits 4`."
