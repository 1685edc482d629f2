"""Every model of the zoo as a file, one row of JSON for each, smallest first; started again, it goes on.

`PYTHONPATH=src:tests python tests/zoo/run_export.py ROWS.jsonl [--failed] [--only GLOB]`. A process takes a few models
and ends, so that a change of the code is seen soon and a crash costs one row.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import zoo_shim
import zoo_timm
import zoo_torchvision
import zoo_transformers
from zoo_run import Case

AT_ONCE = 8
CASES = {
    f"{case.package}-{case.name}": case
    for case in [*zoo_torchvision.CASES, *zoo_timm.CASES, *zoo_transformers.CASES]
}


def main() -> None:
    options = _options()
    sizes = _sizes(options.rows.with_suffix(".sizes.json"))
    while names := _left(options, sizes)[:AT_ONCE]:
        child = multiprocessing.get_context("spawn").Process(target=_work, args=(names, options.rows))
        child.start()
        child.join()
        if child.exitcode:
            _blame(names, options.rows, f"the process ended with {child.exitcode}")
        options.failed = False  # each once
    _show(_rows(options.rows))


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--failed", action="store_true", help="first run the models again that failed")
    parser.add_argument("--only", default="*")
    return parser.parse_args()


def _left(options: Any, sizes: dict[str, float]) -> list[str]:
    rows = _rows(options.rows)
    if options.failed:
        kept = [row for row in rows.values() if _right(row)]
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        rows = _rows(options.rows)
    return sorted((n for n in CASES if n not in rows and fnmatchcase(n, options.only)), key=sizes.__getitem__)


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def _right(row: dict[str, Any]) -> bool:
    return bool(row["ok"]) and not row.get("differences")


def _work(names: Iterable[str], rows: Path) -> None:
    from zoo_export import export

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            _append(rows, {"name": name, **_outcome(export, CASES[name], Path(folder))})


def _outcome(export: Any, case: Case, folder: Path) -> dict[str, Any]:
    try:
        found = export(case, folder)
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {
        "ok": found.ok,
        "differences": found.differences,
        "announced": found.announced,
        "counted": found.counted,
        "seconds": found.seconds,
        "why_float": str(found.report.why_float) if found.differences else "",
    }


def _append(rows: Path, row: dict[str, Any]) -> None:
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _blame(names: list[str], rows: Path, error: str) -> None:
    """The first without a row is the one that ran."""
    done = _rows(rows)
    name = next((name for name in names if name not in done), None)
    if name:
        _append(rows, {"name": name, "ok": False, "error": error})


def _sizes(path: Path) -> dict[str, float]:
    """Parameters of every model, kept in a file; unknown ones count as large."""
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    zoo_shim.install()
    sizes = {name: _size(case) for name, case in CASES.items()}
    path.write_text(json.dumps(sizes), encoding="utf-8")
    return sizes


def _size(case: Case) -> float:
    try:
        with torch.device("meta"):
            model = case.build()
    except (RuntimeError, NotImplementedError, ValueError):  # its constructor looks at values
        return 3e7
    return float(sum(p.numel() for p in model.parameters()))


def _show(rows: dict[str, dict[str, Any]]) -> None:
    wrong = [row for row in rows.values() if not _right(row)]
    print(f"{len(rows)} of {len(CASES)} models, {len(wrong)} of them wrong")
    for row in wrong:
        print(f"{row['name']}: {row.get('error') or row.get('differences')}")


if __name__ == "__main__":
    main()
