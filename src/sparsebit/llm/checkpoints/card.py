"""README.md of an output folder: it describes the checkpoint, its settings, its size, and the programs that run it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebit.llm.report import Report
from sparsebit.utils.files import write_whole

CARD = "README.md"


def write_card(report: Report, run: dict[str, Any], config: dict[str, Any]) -> None:
    """`run` holds the settings of the user."""
    lines = [*_head(report, config), *_sizes(report), *_quality(report), *_recipe(run), *_readers(report)]
    write_whole(report.folder / CARD, ("\n".join(lines) + "\n").encode())


def _head(report: Report, config: dict[str, Any]) -> Iterator[str]:
    from sparsebit import __version__

    if report.sparsity is None:
        what = f"{report.average_bits:.3g} bits"
    else:
        what = f"{report.sparsity:.0%} zeros"
    yield "---"
    yield "library_name: transformers"
    yield f"tags: [{'quantized' if report.sparsity is None else 'pruned'}, sparsebit]"
    yield "---"
    name = (config.get("architectures") or ["A model"])[0]
    yield f"# {name}, {what}"
    yield ""
    yield f"Made by Sparsebit {__version__}."
    yield ""
    for row in report.readers:
        if row.state in ("failed", "untried"):
            yield f"> **Not certified.** {row}"
            yield ""
    first = next((row for row in report.readers if row.reader == "transformers"), None)
    theirs = first is not None and first.state not in ("refused", "failed")
    yield "```python"
    yield f"from transformers import {name}" if theirs else "from sparsebit import llm"
    yield ""
    where = '"path/of/this/folder"'
    yield f"model = {name}.from_pretrained({where})" if theirs else f"model = llm.load({where})"
    yield "```"
    yield ""


def _sizes(report: Report) -> Iterator[str]:
    files = sum(path.stat().st_size for path in report.folder.glob("*.safetensors"))
    quantized = sum(report.sizes.values())
    left = sum(report.left.values())
    others = sum(size for name, size in report.layout.kept if not report.layout.inside(name))
    yield "| | |"
    yield "|---|---|"
    yield f"| files | {files / 1e6:.1f} MB |"
    yield f"| weights in {len(report.layers)} layers | {quantized:,} |"
    yield f"| weights that stay float in the blocks | {left:,} ({report.left_share:.0%}) |"
    yield f"| weights in other matrices, float | {others:,} |"
    if report.sparsity is None:
        yield f"| bits per weight | {report.average_bits:.2f}, with scales {report.stored_bits:.2f} |"


def _quality(report: Report) -> Iterator[str]:
    """Figures that were measured; a report without them has no rows."""
    for label, value in report.measured.rows() if report.measured else ():
        yield f"| {label} | {value} |"
    for name in report.worst(1):
        yield f"| output changed most | {report.layers[name]['error']:.2%} in {name} |"


def _recipe(run: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Recipe"
    yield ""
    identity = ("layout", "inputs", "weights")
    said = {k: v for k, v in run.items() if k not in identity and v not in (None, [], {}, False)}
    yield ", ".join(f"{key} {value}" for key, value in said.items())


def _readers(report: Report) -> Iterator[str]:
    yield ""
    yield "## Who runs it"
    yield ""
    for row in report.readers:
        yield f"- {row}"
    if not report.readers:
        yield "- `sparsebit.llm.load`: the model is not of transformers, so no other program builds it"


def copy_card(source: Path, folder: Path) -> None:
    """For a folder that `save_pretrained` makes of a loaded one."""
    if (source / CARD).is_file() and source.resolve() != folder.resolve():
        write_whole(folder / CARD, (source / CARD).read_bytes())
