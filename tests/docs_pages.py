"""The pages, their blocks of code, and what blocks need that are about models of transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.registries import REGISTRIES, registry
from sparsebit.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/howto").glob("*.md")),
]
TRANSLATED = {
    ROOT / "README_zh-CN.md": ROOT / "README.md",
    ROOT / "docs/zh/index.md": ROOT / "docs/index.md",
    ROOT / "docs/zh/get-started.md": ROOT / "docs/get-started.md",
    ROOT / "docs/zh/concepts.md": ROOT / "docs/concepts.md",
    ROOT / "docs/zh/command-line.md": ROOT / "docs/howto/command-line.md",
    ROOT / "docs/zh/prune.md": ROOT / "docs/howto/prune.md",
    ROOT / "docs/zh/llm.md": ROOT / "docs/howto/llm.md",
}
ALL_MARKDOWN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs: ([\w, ]+) -->\n$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass
class Block:
    kind: str  # the word behind the fence: python, console (commands and what they print), text (output only)
    line: int  # of its first line, from 1
    code: str
    needs: tuple[str, ...] = ()  # packages; said in a comment above the block

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def blocks_of(page: Path, kind: str = "python") -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        if fence[1] == kind:
            needs = NEEDS.search(text, 0, fence.start())
            packages = tuple(re.findall(r"\w+", needs[1])) if needs else ()
            found.append(Block(kind, text.count("\n", 0, fence.start(2)) + 1, fence[2], packages))
    return found


@contextmanager
def own_registries() -> Iterator[None]:
    """Only what the package registers; what a page adds is gone afterwards."""
    every: list[Any] = [registry(kind) for kind in REGISTRIES]
    registries = [found for found in every if isinstance(found, Registry)]
    saved = [dict(plugins._items) for plugins in registries]
    for plugins in registries:
        foreign = [key for key, item in plugins.items() if not item.__module__.startswith("sparsebit.")]
        for key in foreign:
            del plugins._items[key]
    try:
        yield
    finally:
        for plugins, items in zip(registries, saved):
            plugins._items.clear()
            plugins._items.update(items)


# -- what pages start from: the files and names that a reader of theirs has -----------------------------------
def _language_model(folder: Path) -> dict[str, Any]:
    """A small LLaMA where the page says the user's model is."""
    sys.path.insert(0, str(ROOT / "tests" / "cli"))
    model = folder / "path/to/SmolLM2-135M"
    __import__("llm_files").tiny_llama(model.parent, tokens=64)
    (model.parent / "model").rename(model)
    letters = {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}, "merges": []}
    told = json.loads((model / "tokenizer.json").read_text())
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    told |= {"model": letters, "added_tokens": [], "pre_tokenizer": cut}
    (model / "tokenizer.json").write_text(json.dumps(told))
    return {}


def _packed_model(folder: Path) -> dict[str, Any]:
    """A checkpoint of `llm.quantize` in `out`, as the page before gives it, and the batches that it took."""
    import torch

    from sparsebit import llm

    _language_model(folder)
    batches = [torch.randint(50, (2, 16)) for _ in range(2)]
    llm.quantize(folder / "path/to/SmolLM2-135M", batches, bits=4, group_size=64, save=folder / "out")
    return {"batches": batches}


START: dict[str, Callable[[Path], dict[str, Any]]] = {
    "docs/howto/llm.md": _language_model,
    "docs/howto/qlora.md": _packed_model,
    "docs/howto/prune.md": lambda folder: {},
}
