"""The results side by side, and the bars of the issue that asked for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from real.place import Place, read

NNCF = ("nncf", "nncf-mixed", "openvino-nncf", "openvino-nncf-mixed")
STATIC = ("static-minmax", "static-reduced", "static-percentile", "static-entropy")
HEAD = (
    "network",
    "metric",
    "float",
    "ours, simulated",
    "ours, file",
    "NNCF",
    "quantize_static",
    "ours - NNCF",
)

LEGEND = (
    "Metric of the judged half (detectors: / of all images) [95 % interval], SQNR per output against the float file, "
    "time against the float file (x). NNCF: the better of its presets PERFORMANCE and MIXED; quantize_static: the "
    "better variant; where the best metric and the best SQNR come from two files, both bests stand there.",
)


def text(places: dict[str, Place], where: str, label: str) -> str:
    rows = [Row(name, place, where, label) for name, place in places.items()]
    rows = [row for row in rows if row.floating]
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join([*lines, "", *LEGEND, "", *tries(rows), *bars(rows)])


def kept(places: dict[str, Place], where: str, label: str) -> list[dict[str, str]]:
    """The rows of the table, for docs/figures."""
    rows = [Row(name, place, where, label) for name, place in places.items()]
    return [dict(zip(HEAD, row.cells())) for row in rows if row.floating]


class Row:
    """What is known of one network."""

    def __init__(self, name: str, place: Place, where: str, label: str):
        self.name, self.place, self.where, self.label = name, place, where, label
        self.floating = read(place.score("float", "here"))
        self.simulated = read(place.score(label, "simulated"))
        self.ours = read(place.score(label, where))
        self.nncf = self.scores(NNCF)
        self.static = self.scores(STATIC)
        self.times = read(place.times(where))

    def scores(self, tools: tuple[str, ...]) -> list[dict[str, Any]]:
        return [found for tool in tools if (found := read(self.place.score(tool, self.where)))]

    def cells(self) -> list[str]:
        floating = f"{number(self.floating)}"
        return [
            *(self.name, self.floating["metric"], floating, figures([self.simulated], {})),
            *(figures(found, self.times) for found in ([self.ours], self.nncf, self.static)),
            self.difference(),
        ]

    def difference(self) -> str:
        """Ours less the better of NNCF, in pairs of resamples."""
        if not (self.ours and self.nncf):
            return ""
        low, high = apart(self.ours, better(self.nncf))
        return f"{self.ours['value'] - better(self.nncf)['value']:+.2f} [{low:+.2f}, {high:+.2f}]"


def apart(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float]:
    difference = np.array(a["replicates"]) - np.array(b["replicates"])
    low, high = np.percentile(difference, [2.5, 97.5])
    return float(low), float(high)


def better(found: list[dict[str, Any]]) -> dict[str, Any]:
    return max(found, key=lambda row: (row["value"], mean_sqnr(row)))


def mean_sqnr(row: dict[str, Any]) -> float:
    return float(np.mean(row["sqnr"]))


def number(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    whole = f" / {row['value_all']:.1f}" if "value_all" in row else ""
    return f"{row['value']:.1f}{whole} [{low:.1f}, {high:.1f}]"


def figures(found: list[dict[str, Any]], times: dict[str, Any]) -> str:
    """The metric of the better file; the better SQNR; times against float."""
    found = [row for row in found if row]
    if not found:
        return ""
    best = better(found)
    noise = max(found, key=mean_sqnr)
    parts = [number(best), " / ".join(f"{value:.1f}" for value in noise["sqnr"]) + " dB"]
    if best["tool"] in times:
        parts.append(f"x {times[best['tool']]['ratio']:.2f}")
    return ", ".join(parts)


def tries(rows: list[Row]) -> list[str]:
    """Every file that is there, one per line."""
    from real.scores import line

    lines = ["```text"]
    for row in rows:
        for file in sorted(row.place.folder.glob("*.json")):
            found = read(file) if file.name.count(".") == 2 and not file.name.endswith(".made.json") else {}
            if "replicates" in found:
                ratio = read(row.place.times(found["where"])).get(found["tool"])
                lines.append(line(found) + (f"  x {ratio['ratio']:.2f}" if ratio else ""))
        for tool in row.place.tools():
            made = read(row.place.made(tool))
            if "failed" in made:
                lines.append(f"{row.name:13} {tool:18} failed: {made['failed']}")
            elif made.get("certified") is False:
                lines.append(f"{row.name:13} {tool:18} the certificate does not hold")
    return [*lines, "```", ""]


# -- bars --------------------------------------------------------------------------------------------------
def bars(rows: list[Row]) -> list[str]:
    both = [row for row in rows if row.ours and row.nncf]
    if not both:
        return []
    below = [row.name for row in both if apart(row.ours, better(row.nncf))[1] < 0]
    above = [row.name for row in both if mean_sqnr(row.ours) > max(map(mean_sqnr, row.nncf))]
    under = [row.name for row in both if row.name not in above]
    lines = [
        f"- metric not below NNCF's by more than the interval: {verdict(not below)}"
        + (f" ({', '.join(below)})" if below else ""),
        f"- SQNR above NNCF's: {len(above)} of {len(both)}" + (f" (not {', '.join(under)})" if under else ""),
        f"- certificates hold: {certificates(rows)}",
    ]
    return lines + [line for row in rows if row.ours for line in own_bars(row)]


def verdict(ok: bool) -> str:
    return "yes" if ok else "NO"


def certificates(rows: list[Row]) -> str:
    made = {row.name: read(row.place.made(row.label)) for row in rows}
    failed = [name for name, found in made.items() if found and not found.get("certified")]
    return "NO: " + ", ".join(failed) if failed else "yes"


def own_bars(row: Row) -> list[str]:
    value, noise = row.ours.get("value_all", row.ours["value"]), mean_sqnr(row.ours)
    whole = row.floating.get("value_all", row.floating["value"])
    ratio = row.times.get(row.label, {}).get("ratio")
    timed = "not timed" if ratio is None else f"{ratio:.2f} ({verdict(ratio <= 1)})"
    if row.name == "YOLOX-nano":
        return [
            f"- YOLOX-nano: {noise:.1f} dB, at least 13.5: {verdict(noise >= 13.5)}; AP of all images {value:.1f}, "
            f"at least 31: {verdict(value >= 31)}; at most the float time: {timed}"
        ]
    if row.name == "FastestDet":
        return [
            f"- FastestDet: {noise:.1f} dB, at least 14: {verdict(noise >= 14)}; AP of all images {value:.1f}, within "
            f"0.7 of {whole:.1f}: {verdict(value >= whole - 0.7)}; at most the float time: {timed}"
        ]
    if row.name == "MobileNetV2":
        return [f"- MobileNetV2: {noise:.1f} dB, at least 21.5: {verdict(noise >= 21.5)}"]
    return []
