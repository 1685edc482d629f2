"""SQNR of each output, the metric, and its bootstrap interval."""

from __future__ import annotations

from typing import Any

import numpy as np

from real.feeds import Array, load_batches, load_outputs
from real.network import Network
from real.place import Place, write

RESAMPLES = 200


def decibels(reference: Array, got: Array) -> float:
    """Signal to quantization noise, in dB; 200 where there is none."""
    noise = ((reference - got).astype(np.float64) ** 2).sum()
    signal = (reference.astype(np.float64) ** 2).sum()
    return round(float(10 * np.log10(signal / noise)), 2) if noise else 200.0


def replicates(measure: Any, rows: Array) -> list[float]:
    """The metric of resampled rows. All tools see the same resamples, so that differences can be taken in pairs."""
    chance = np.random.default_rng(0)
    return [round(float(measure(chance.choice(rows, len(rows)))), 4) for _ in range(RESAMPLES)]


def interval(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def rows_of(network: Network, place: Place, tool: str, where: str) -> list[Array]:
    """The outputs of a tool, one row per sample."""
    count = sum(len(next(iter(batch.values()))) for batch in load_batches(place.judge))
    return network.rows(load_outputs(place.outputs(tool, where)), count)


def score(network: Network, place: Place, tool: str, where: str) -> dict[str, Any]:
    """Judge the outputs of a tool, and keep the figures."""
    reference, outputs = rows_of(network, place, "float", "here"), rows_of(network, place, tool, where)
    rows = network.judged(len(outputs[0]))
    samples = network.samples(len(outputs[0]))
    measure = network.measure(place, outputs)
    found = {
        "network": network.name,
        "tool": tool,
        "where": where,
        "metric": network.metric,
        "value": round(float(measure(samples)), 4),
        "rows": len(samples),
        "sqnr": [decibels(a[rows], b[rows]) for a, b in zip(reference, outputs)],
        "also": network.also(place, outputs),
        "replicates": replicates(measure, samples),
    }
    found["interval"] = [round(end, 4) for end in interval(found["replicates"])]
    if len(rows) < len(outputs[0]):
        found["value_all"] = round(float(measure(np.arange(len(outputs[0])))), 4)
    write(place.score(tool, where), found)
    return found


def line(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    whole = f", all rows {found['value_all']:.2f}" if "value_all" in found else ""
    noise = "" if found["tool"] == "float" else " / ".join(f"{x:.2f}" for x in found["sqnr"]) + " dB"
    more = "".join(f", {name} {value:.3f}" for name, value in found["also"].items())
    return (
        f"{found['network']:13} {found['tool']:18} {found['where']:10} {found['metric']} {found['value']:.2f} "
        f"[{low:.2f}, {high:.2f}]{whole}{more}  {noise}"
    )
