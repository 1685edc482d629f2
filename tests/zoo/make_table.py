"""Runs the zoo and writes docs/zoo.md: `PYTHONPATH=src python tests/zoo/make_table.py [processes]`, with the three
packages."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
import zoo_timm
import zoo_torchvision
import zoo_transformers
from zoo_run import Row, run

CASES = [*zoo_torchvision.CASES, *zoo_timm.CASES, *zoo_transformers.CASES]
PAGE = """# Models that Sparsebit takes as they are

<!-- Generated, do not edit: `PYTHONPATH=src python tests/zoo/make_table.py` with {versions} -->
Each model is built with random weights, unedited, and goes through `QuantModel(model, config, example=batch)` with the
preset `w8a8`, calibration on two batches and quantization. `tests/zoo/test_zoo.py` repeats it and refuses a float
output that differs by more than 1e-4 of its largest value, and a share of quantized MACs under 95 %.

- **front-end**: `fx` (`trace="fx"`), or `export` (`trace="export"`) where `fx` leaves more than 5 % of the MACs float.
  The default, `trace="auto"`, chooses by itself.
- **MACs quantized**: multiplications whose operands are both quantized, counted during one forward. For LSTMs (of these
  models sequencer2d_s has some) the config adds `A.RNN_STATE: true`; without it their hidden state stays float
  (91.8 % of the MACs of sequencer2d_s).
- **islands**: parts that torch.fx cannot trace; they run as they are, with their layers quantized in place.
- **SQNR** in dB; the signal is what changes in the output with another input. In brackets: plain min/max W8A8 of Linear
  and Conv by hand. These are untrained nets on a little noise: read it as "works", not as accuracy. A dash: outputs
  that cannot be compared (a detector that found other boxes).

{summary}

"""


def measured(i: int) -> Row:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return run(CASES[i])


def decibel(row: Row) -> str:
    shown = ["-" if db is None else f"{db:.0f}" for db in (row.db, row.plain_db)]
    return f"{shown[0]} ({shown[1]})"


def islands(row: Row) -> str:
    names = [path or "the whole model" for path in row.islands]
    more = f", ... ({len(names)})" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def table(package: str, rows: list[Row]) -> str:
    lines = [f"## {package}: {len(rows)} models, {len({row.family for row in rows})} families", ""]
    lines += ["| model | family | front-end | MACs quantized | SQNR | islands |", "|---|---|---|---|---|---|"]
    for row in rows:
        share = f"{row.share * 100:.1f} %"
        lines.append(
            f"| {row.name} | {row.family} | {row.trace} | {share} | {decibel(row)} | {islands(row)} |"
        )
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    traces = Counter(row.trace for row in rows)
    least = min(row.share for row in rows)
    return (
        f"{len(rows)} models: {traces['fx']} through `fx` ({sum(bool(row.islands) for row in rows)} with islands), "
        f"{traces['export']} through `export`. Least share of MACs {least * 100:.1f} %, "
        f"largest float difference {max(row.error for row in rows):.0e}. Median time to build, calibrate and quantize "
        f"on one core: {median(row.seconds for row in rows):.1f} s."
    )


def main(processes: int = 2) -> None:
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=40) as pool:
        rows = pool.map(measured, range(len(CASES)), chunksize=1)
    packages = list(dict.fromkeys(row.package for row in rows))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    tables = [table(name, [row for row in rows if row.package == name]) for name in packages]
    text = PAGE.format(versions=versions, summary=summary(rows)) + "\n".join(tables)
    (Path(__file__).resolve().parents[2] / "docs" / "zoo.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
