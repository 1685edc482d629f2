"""A graph as mermaid text, which GitHub, GitLab and many editors draw."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from sparsebit.graph.ops import module_of

_RESERVED = {
    "class",
    "classDef",
    "click",
    "default",
    "end",
    "flowchart",
    "graph",
    "linkStyle",
    "style",
    "subgraph",
}
_ESCAPES = str.maketrans(
    {'"': "#quot;", "<": "#lt;", ">": "#gt;", "[": "#91;", "]": "#93;", "#": "#35;", "\n": " "}
)


def to_mermaid(gm: fx.GraphModule, label: Callable[[fx.Node], str] | None = None) -> str:
    """One box `name["name(target), Type"]` per node, one arrow per edge; `label(node)` adds a line."""
    lines = ["graph TD"]
    for node in gm.graph.nodes:
        extra = label(node) if label is not None else ""
        text = f"{node.name}({_target(node)}), {_type(node, gm)}".translate(_ESCAPES)
        text += f"<br/>{extra.translate(_ESCAPES)}" if extra else ""
        lines.append(f'{_id(node)}["{text}"]')
        if node.op in ("placeholder", "output"):
            lines.append(f"style {_id(node)} fill:#cafe02")
        lines += [f"{_id(source)} --> {_id(node)}" for source in node.all_input_nodes]
    return "\n".join(lines) + "\n"


def _id(node: fx.Node) -> str:
    return f"{node.name}_" if node.name in _RESERVED else node.name


def _target(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _type(node: fx.Node, gm: fx.GraphModule) -> str:
    return type(module_of(node, gm)).__name__ if node.op == "call_module" else node.op
