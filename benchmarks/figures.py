"""Figures that README and docs quote: kept in docs/figures/*.json, with the command, the versions and the machine.

A benchmark calls `started()` first and `save()` at the end. `fill()` puts a table into the pages.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "figures"
PACKAGES = ("torch", "onnx", "onnxruntime", "transformers")
SHORT = 15.0  # seconds: a run that only puts figures together
QUIET = 0.1  # cores that other work may take while times are measured
SETS = ("avx512_vnni", "avx_vnni", "avx512f", "avx2")  # the first one that the CPU has is named


def cpu() -> str:
    """Name, instruction set and cores of this machine."""
    text = Path("/proc/cpuinfo").read_text("utf-8")
    name = re.search(r"model name\s*: (.*)", text)
    found = next((s for s in SETS if re.search(rf"\b{s}\b", text)), "no AVX2")
    return f"{name[1] if name else 'CPU'}, {found}, {os.cpu_count()} cores"


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _busy() -> tuple[float, float]:
    """Seconds of all cores that the machine, and this process with its ended children, have worked."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def started() -> dict[str, Any]:
    return {"load": round(os.getloadavg()[0], 2), "clock": time.monotonic(), "busy": _busy()}


def save(name: str, rows: list[dict[str, Any]], start: dict[str, Any], **more: Any) -> Path:
    """Write docs/figures/<name>.json. Times are good only if `others` is near 0: the cores that other work took."""
    seconds, busy = time.monotonic() - start["clock"], _busy()
    others = (busy[0] - start["busy"][0]) - (busy[1] - start["busy"][1])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    script = Path(sys.argv[0]).resolve()
    script = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    about = {
        "command": shlex.join(["python", str(script), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "cpu": cpu(),
        "load": start["load"],
        "others": round(max(others, 0.0) / seconds, 2) if seconds > SHORT else None,  # measured in other runs
        "seconds": round(seconds),
        "versions": {**versions(), **more.pop("versions", {})},
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({**about, **more, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def caption(stored: dict[str, Any]) -> str:
    """When, with what and where: a line under a table."""
    packages = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    busy = (
        ""
        if (stored["others"] or 0.0) <= QUIET
        else f" Other work took {stored['others']} cores: the times are not final."
    )
    note = f" {stored['note']}" if "note" in stored else ""
    return f"Measured {stored['date']} at {stored['commit']}: {stored['cpu']}; {packages}.{busy}{note}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def filled(text: str, name: str, content: str) -> str:
    """`text` with `content` between `<!-- table: name -->` and `<!-- end table -->`."""
    marked = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end table -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)
