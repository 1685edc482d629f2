"""The facts as Markdown: for pull requests and notes."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebit.report.facts import Facts, count, decibel, size
from sparsebit.report.formats import FORMATS


@FORMATS.register("md")
def as_markdown(facts: Facts) -> str:
    parts = [f"# {facts.command} {facts.title}", _table(["", "", ""], facts.headline)]
    if facts.hurt_most:
        lines = [f"- `{x.name}`: {decibel(x.effect)} at the output; try `{x.fix}`" for x in facts.hurt_most]
        parts += ["## What to try next", "\n".join(lines)]
    if facts.layers:
        head = ["layer", "op", "bits", "range", "SQNR of the output", "bytes", "MACs", "runs"]
        rows = [
            [x.name, x.op, x.bits or x.state, x.range, decibel(x.effect), size(x.bytes) if x.bytes else "",
             count(x.macs) if x.macs else "", x.backend]
            for x in facts.layers
        ]  # fmt: skip
        parts += ["## Layers", _table(head, rows)]
    if facts.pruned:
        rows = [[name, str(before), str(after)] for name, before, after in facts.pruned]
        parts += ["## Channels", _table(["layer", "before", "after"], rows)]
    if facts.certificate:
        parts += ["## Certificate", "```text\n" + "\n".join(facts.certificate) + "\n```"]
    if facts.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in facts.notes)]
    return "\n\n".join(parts) + f"\n\nWritten by Sparsebit {facts.version}.\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cell = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) if rows else ""
