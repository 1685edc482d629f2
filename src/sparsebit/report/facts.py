"""What a run has to say, from the files in its folder: run.json, layers.json, profile.json, plan.json, the certificate.

The noise that a layer alone adds to the output is 10^(-SQNR/10) of the signal; its share of the sum over all layers
is what the chart shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebit.errors import SparsebitError

HURT_MOST = 3


@dataclass
class Layer:
    """One op of a quantized model."""

    name: str
    path: str
    op: str
    state: str
    how: str
    bits: str = ""  # W8 A8
    scheme: str = ""
    range: str = ""
    own: float | None = None  # SQNR of its own output in dB, quantized alone
    effect: float | None = None  # SQNR of the model's output
    noise: float | None = None  # its share of the noise of all layers
    bytes: int = 0
    quantized_bytes: int = 0
    macs: int = 0
    integer: bool = False
    backend: str = ""
    fix: str = ""
    fixed: float | None = None  # `own` with the fix


@dataclass
class Facts:
    title: str
    command: str
    version: str
    headline: list[tuple[str, str, str]] = field(default_factory=list)  # label, value, remark
    layers: list[Layer] = field(default_factory=list)
    pruned: list[tuple[str, int, int]] = field(default_factory=list)  # layer, channels before, after
    certificate: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def hurt_most(self) -> list[Layer]:
        """The layers that cost most and have a fix."""
        ranked = sorted(
            (x for x in self.layers if x.effect is not None and x.fix), key=lambda x: x.effect or 0
        )
        return ranked[:HURT_MOST]


def read_facts(folder: Path) -> Facts:
    about = _read(folder / "run.json")
    if about is None:
        raise SparsebitError(f"{folder}: is no folder of a run: it has no run.json")
    try:
        return _facts(folder, about)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SparsebitError(f"{folder}: its files are broken, or of another version ({error!r})") from None


def _facts(folder: Path, about: dict[str, Any]) -> Facts:
    steps = about["steps"]
    facts = Facts(_short(about["inputs"]["model"]), about["command"], about["sparsebit"])
    facts.settings = about["settings"]
    if about["command"] not in steps:
        facts.notes.append(f"This run is not finished: repeat its command with --resume to {facts.command}.")
        return facts
    layers, profile = _read(folder / "layers.json"), _read(folder / "profile.json")
    if layers is not None:
        facts.layers = [_layer(row, layers["quantizers"]) for row in layers["rows"]]
        facts.notes += layers["notes"]
        facts.notes += [f"{i['path'] or 'the model'} was not traced: {i['error']}" for i in layers["islands"]]
    if profile is not None:
        _add_noise(facts.layers, profile)
    elif layers is not None:
        facts.notes.append(
            f"No error per layer yet: run `sparsebit profile {folder}`, then this report again."
        )
    plan = _read(folder / "plan.json")
    if plan is not None:
        facts.pruned = [
            (name.removesuffix(".weight"), plan["sizes"][name][axis], len(axes[str(axis)]))
            for name, axes in plan["kept"].items()
            if name.endswith("weight")
            for axis in [min(map(int, axes))]
        ]
        facts.notes += [f"Not cut: {reason}" for reason in plan["reasons"]]
    exported = steps.get("export")
    if exported is not None:
        facts.certificate = exported["certificate"]  # a file that does not hold is never put in its place
    else:
        facts.notes.append(f"No ONNX file yet: run `sparsebit export {folder}`.")
    facts.headline = list(_headline(facts, steps, layers, profile))
    return facts


def _headline(facts: Facts, steps: Any, layers: Any, profile: Any) -> Any:
    if layers is not None:
        totals = layers["totals"]
        before, after = totals["bytes"], totals["quantized_bytes"]
        yield (
            "Parameters",
            f"{size(before)} → {size(after)}",
            f"{100 * after / max(before, 1):.0f} % of the size",
        )
        ops = f"{totals['quantized']} of {totals['quantized'] + totals['float']} ops"
        yield "Quantized", ops, f"{totals['absorbed']} more run inside others"
        if totals.get("macs"):
            share = 100 * totals["integer_macs"] / totals["macs"]
            yield "In integers", f"{share:.0f} % of MACs", f"by {layers['backend']}, as expected"
    for key, label in (("params", "Parameters"), ("macs", "MACs")):
        if facts.command == "prune":
            before, after = steps["prune"][key]
            yield label, f"{count(before)} → {count(after)}", f"{100 * after / max(before, 1):.0f} % stay"
    if profile is not None:
        yield "Output SQNR", decibel(profile["total"]), "everything quantized, against float"
    if "export" in steps:
        yield "ONNX file", size(steps["export"]["bytes"]), "has been run and compared"


def _layer(row: dict[str, Any], quantizers: dict[str, Any]) -> Layer:
    mine = [quantizers[name] for name in row["quantizers"] if name in quantizers]
    known = ("name", "path", "op", "state", "how", "bytes", "quantized_bytes", "macs", "integer", "backend")
    return Layer(
        **{key: row[key] for key in known},
        bits=" ".join(f"{q['tensor']}{q['bits']}" for q in mine),
        scheme=" / ".join(dict.fromkeys(q["scheme"] for q in mine)),
        range=" / ".join(f"{q['range'][0]:.3g} … {q['range'][1]:.3g}" for q in mine),
    )


def _add_noise(layers: list[Layer], profile: Any) -> None:
    rows = {row["name"]: row for row in profile["rows"]}
    noise = {name: 10 ** (-float(row["effect"]) / 10) for name, row in rows.items()}
    total = sum(noise.values()) or 1.0
    for layer in layers:
        row = rows.get(layer.name)
        if row is not None:
            layer.own, layer.effect, layer.fix = float(row["own"]), float(row["effect"]), row["fix"]
            layer.fixed = None if row["fixed"] is None else float(row["fixed"])
            layer.noise = noise[layer.name] / total


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise SparsebitError(f"{path}: is broken; make the run again") from None


def _short(spec: str) -> str:
    """`net.py:build` of `/home/me/net.py:build`: a report may be shown to others."""
    return spec.rpartition("/")[2]


# -- how figures are written -----------------------------------------------------------------------------
def decibel(value: Any) -> str:
    if value is None:
        return ""
    number = float(value)
    return "exact" if number == float("inf") else f"{number:.1f} dB"


def size(n: float) -> str:
    return f"{n:.0f} B" if n < 1000 else f"{count(n)}B"


def count(n: float) -> str:
    """12345678 -> 12.3 M."""
    for unit in ("", " k", " M"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g} G"
