"""The facts of a run, from the files in its folder: run.json, layers.json, profile.json, plan.json, the certificate.

A layer alone adds noise to the output: 10^(-SQNR/10) of the signal; its share of the sum over all layers
is drawn in the chart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sparsebit
from sparsebit.errors import SparsebitError
from sparsebit.report.facts import Facts, Graph, Histogram, Layer
from sparsebit.report.figures import share, span
from sparsebit.report.headline import headline
from sparsebit.report.llm_facts import llm_facts


def read_facts(folder: Path) -> Facts:
    about = _read(folder / "run.json")
    if about is None:
        raise SparsebitError(f"{folder}: is not a folder of a run: it has no run.json")
    try:
        if "steps" not in about and "layers" in about:  # a run of sparsebit.llm, which writes other files
            return llm_facts(folder, about, sparsebit.__version__)
        return _facts(folder, about)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise SparsebitError(f"{folder}: its files are broken, or of another version ({error!r})") from None


def _facts(folder: Path, about: dict[str, Any]) -> Facts:
    steps = about["steps"]
    facts = Facts(_short(about["inputs"]["model"]), about["command"], about["sparsebit"])
    facts.settings = about["settings"]
    if about["command"] not in steps:
        facts.todo.append(f"This run is not finished: repeat its command with --resume to {facts.command}.")
        return facts
    layers = _read(folder / "layers.json")
    profile = _read(folder / "profile.json")
    if layers is not None:
        _add_layers(facts, layers, _read(folder / "histograms.json") or {})
    if profile is not None:
        _add_noise(facts.layers, profile)
        facts.todo += list(_together(profile))
    elif layers is not None:
        facts.todo.append(
            f"No error per layer yet: `sparsebit profile {folder}` measures it, and tries overrides that help."
        )
    graph = _read(folder / "graph.json")
    if graph is not None:
        nodes = [(node["name"], node["op"]) for node in graph["nodes"]]
        facts.graph = Graph(nodes, [(a, b) for a, b in graph["edges"]], graph["mermaid"])
    plan = _read(folder / "plan.json")
    if plan is not None:
        facts.pruned = list(_channels(plan))
        facts.notes += [f"Not cut: {reason}" for reason in plan["reasons"]]
    exported = steps.get("export")
    if exported is not None:
        facts.certificate = exported["certificate"]  # a file that does not hold is never put in its place
        _add_kernels(facts.layers, _read(folder / "model.report.json"))
    elif "failed_export" in about:
        facts.failure = about["failed_export"]["error"]
        facts.alarming = ("Certificate",)
        facts.certificate = about["failed_export"]["certificate"]
    else:
        facts.todo.append(f"No ONNX file yet: `sparsebit export {folder}` writes and checks one.")
    facts.metric = steps.get("metric")
    facts.latency = steps.get("latency")
    facts.headline = list(headline(facts.command, steps, layers, profile, facts.failure))
    return facts


def _add_layers(facts: Facts, layers: Any, histograms: Any) -> None:
    facts.layers = [_layer(row, layers["quantizers"], histograms) for row in layers["rows"]]
    facts.notes += layers["notes"]
    facts.notes += [f"{i['path'] or 'the model'} was not traced: {i['error']}" for i in layers["islands"]]


def _layer(row: dict[str, Any], quantizers: dict[str, Any], histograms: dict[str, Any]) -> Layer:
    mine = {name: quantizers[name] for name in row["quantizers"] if name in quantizers}
    shown = [_histogram(q, histograms[name]) for name, q in mine.items() if name in histograms]
    known = ("name", "path", "op", "state", "how", "bytes", "quantized_bytes", "macs", "integer", "backend")
    return Layer(
        **{key: row[key] for key in known},
        bits=" ".join(f"{q['tensor']}{q['bits']}" for q in mine.values()),
        scheme=" / ".join(dict.fromkeys(q["scheme"] for q in mine.values())),
        range=" / ".join(span(*q["range"]) for q in mine.values()),
        clipped=" / ".join(share(h.clipped) or "?" for h in shown),
        histograms=shown,
    )


def _histogram(quantizer: Any, found: Any) -> Histogram:
    low, high = found["range"]
    label = f"{quantizer['tensor']}{quantizer['bits']}"
    return Histogram(label, found["from"], found["to"], found["counts"], (low, high), found["clipped"])


def _add_noise(layers: list[Layer], profile: Any) -> None:
    rows = {row["name"]: row for row in profile["rows"]}
    noise = {name: 10 ** (-float(row["effect"]) / 10) for name, row in rows.items()}
    total = sum(noise.values()) or 1.0
    for layer in layers:
        row = rows.get(layer.name)
        if row is not None:
            layer.own = float(row["own"])
            layer.effect = float(row["effect"])
            layer.fix = row["fix"]
            if row["fixed"] is None:
                layer.fixed = None
            else:
                layer.fixed = float(row["fixed"])
            layer.noise = noise[layer.name] / total
            layer.suggested = layer.name in profile.get("suggested", ())


def _together(profile: Any) -> Iterator[str]:
    """The gain of all suggested overrides together."""
    if profile.get("together") is not None:
        before = float(profile["total"])
        after = float(profile["together"])
        yield f"Together these take the output from {before:.1f} to {after:.1f} dB."
    elif profile["rows"]:
        yield "No override of a few layers helps the whole model: try another preset, or more bits for all layers."


def _add_kernels(layers: list[Layer], report: Any) -> None:
    """The written file knows why an op stays float. Its reason replaces the expected one."""
    why = {key.rpartition(" (")[0]: text for key, text in ((report or {}).get("why_float") or {}).items()}
    for layer in layers:
        if layer.path in why and layer.state == "quantized":
            layer.integer = False
            layer.backend = why[layer.path]


def _channels(plan: Any) -> Iterator[tuple[str, int, int]]:
    """Outputs of each layer, or its inputs where only those were cut; norms have the channels of their layer."""
    for name, axes in plan["kept"].items():
        shape = plan["sizes"][name]
        if name.endswith("weight") and len(shape) > 1:
            axis = min(map(int, axes))
            what = " (inputs)" if axis else ""
            yield name.removesuffix(".weight") + what, shape[axis], len(axes[str(axis)])


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
