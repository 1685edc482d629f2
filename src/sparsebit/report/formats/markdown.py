"""The facts as Markdown: for pull requests and notes."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebit.report.facts import Facts
from sparsebit.report.figures import count, decibel, size
from sparsebit.report.formats import FORMATS


@FORMATS.register("md")
def as_markdown(facts: Facts) -> str:
    parts = [f"# {facts.command} {facts.title}", _table(["", "", ""], facts.headline)]
    parts += [f"**Warning**: {facts.warning}"] if facts.warning else []
    lines = [f"- `{x.name}`: {decibel(x.effect)} at the output; try `{x.fix}`" for x in facts.hurt_most]
    lines += [f"- {text}" for text in facts.todo]
    if lines:
        parts += ["## What to try next", "\n".join(lines)]
    if facts.layers:
        head = [
            "layer",
            "op",
            "bits",
            "scheme",
            "range",
            "clipped",
            "output SQNR",
            "own SQNR",
            "bytes",
            "MACs",
        ]
        head += ["runs in"]
        rows = []
        for x in facts.layers:
            rows.append(
                [
                    x.name,
                    x.op,
                    x.bits or x.state,
                    x.scheme or x.how,
                    x.range,
                    x.clipped,
                    decibel(x.effect),
                    decibel(x.own),
                    f"{size(x.bytes)} → {size(x.quantized_bytes)}" if x.bytes else "",
                    count(x.macs) if x.macs else "",
                    x.backend,
                ]
            )
        parts += ["## Layers", _table(head, rows)]
    if facts.graph is not None and facts.graph.mermaid:
        parts += ["## Graph", f"```mermaid\n{facts.graph.mermaid.strip()}\n```"]
    if facts.pruned:
        rows = [[name, str(before), str(after)] for name, before, after in facts.pruned]
        parts += ["## Channels before and after", _table(["layer", "before", "after"], rows)]
    if facts.failure:
        parts += ["## Certificate", f"**DOES NOT HOLD**: {facts.failure}"]
    if facts.certificate:
        parts += [] if facts.failure else ["## Certificate"]
        parts += ["```text\n" + "\n".join(facts.certificate) + "\n```"]
    if facts.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in facts.notes)]
    return "\n\n".join(parts) + f"\n\nWritten by Sparsebit {facts.version}.\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns without a word in them are left out."""
    used = []
    for i in range(len(head)):
        if any(row[i] for row in rows):
            used.append(i)
    head = [head[i] for i in used]
    rows = [[row[i] for i in used] for row in rows]
    cell = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    lines = [head, ["---"] * len(head), *rows]
    if rows:
        return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return ""
