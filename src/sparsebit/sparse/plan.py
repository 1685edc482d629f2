"""Plan: which channels a cut keeps, as plain data: printed, saved, and applied to a fresh copy of the same model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import SparsebitError
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.sparse_config import Heads
from sparsebit.sparse.surgery import Cut
from sparsebit.utils.files import write_whole

VERSION = 1


@dataclass
class Plan:
    """kept: parameter path -> axis -> the positions that stay; sizes: how many there were."""

    kept: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)  # of the example: shapes and types, to trace again
    reasons: list[str] = field(default_factory=list)  # why some channels could not be considered
    heads: Heads = "whole"
    merged: list[str] = field(
        default_factory=list
    )  # blocks that went into the next one, before channels went
    shortened: list[str] = field(default_factory=list)  # branches that a linear layer stands in for

    @classmethod
    def of(cls, cut: Cut) -> Plan:
        plan = cls(reasons=sorted(set(cut.walk.labels.why_fixed.values())), heads=cut.walk.heads)
        for part in cut.walk.slices.values():
            keeps = cut.keeps(part.labels)
            if not bool(keeps.all()):
                plan.kept.setdefault(part.path, {})[part.axis] = keeps.nonzero().flatten().tolist()
        for name, value in [*cut.walk.gm.named_parameters(), *cut.walk.gm.named_buffers()]:
            if name in plan.kept:
                plan.sizes[name] = list(value.shape)
        plan.inputs = [_describe(cut.walk.example)]
        return plan

    def save(self, path: str | Path) -> None:
        body = {"version": VERSION, **vars(self)}
        write_whole(path, json.dumps(body).encode())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            body = json.loads(Path(path).read_text("utf-8"))
            if body.pop("version") != VERSION:
                raise ValueError("another version")
            kept = {
                k: {int(a): list(map(int, i)) for a, i in axes.items()}
                for k, axes in body.pop("kept").items()
            }
            return cls(kept=kept, **body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SparsebitError(f"{path}: is no pruning plan of this version: {error}") from None

    def apply(self, model: nn.Module, example: Any = None) -> nn.Module:
        """A copy of `model` cut like this; then weights saved from the pruned model load into it."""
        from sparsebit.sparse.prune import compact, shallower, walk_of

        example = _rebuild(self.inputs[0]) if example is None else example
        model, _ = shallower(model, example, self.merged, self.shortened)
        walk = walk_of(model, example, self.heads)
        small = compact(model, Cut(walk, self.dropped(walk)))
        small.pruning_plan = self  # type: ignore[assignment]
        return small

    def dropped(self, walk: Walk) -> Tensor:
        """The classes of `walk` that are missing in this plan."""
        found = []
        have = dict([*walk.gm.named_parameters(), *walk.gm.named_buffers()])
        for path, axes in self.kept.items():
            shape = list(have[path].shape) if path in have else None
            if shape != self.sizes[path]:
                raise SparsebitError(
                    f"the plan is of another model: {path} had the shape {self.sizes[path]} when it was made, "
                    f"now {'it is missing' if shape is None else f'it has {shape}'}"
                )
            for axis, keep in axes.items():
                part = walk.slices.get((path, axis))
                if part is None:
                    raise SparsebitError(
                        f"the plan is of another model: nothing prunes axis {axis} of {path}"
                    )
                gone = torch.ones(len(part.labels), dtype=torch.bool)
                gone[keep] = False
                found.append(walk.labels.roots(part.labels[gone]))
        return torch.cat([torch.zeros(0, dtype=torch.long), *found]).unique()

    def channels(self) -> dict[str, tuple[int, int]]:
        """Parameter path -> (channels before, after) on its first axis that was cut."""
        return {k: (self.sizes[k][min(a)], len(a[min(a)])) for k, a in self.kept.items()}

    def __str__(self) -> str:
        rows = [(k.removesuffix(".weight"), *v) for k, v in self.channels().items() if k.endswith("weight")]
        width = max((len(name) for name, _, _ in rows), default=0)
        lines = [f"{name:{width}s} {before:6d} -> {after}" for name, before, after in rows]
        lines += [f"{name}: side by side with the block behind it" for name in self.merged]
        lines += [f"{name}: a linear layer stands in for it" for name in self.shortened]
        return "\n".join([*lines, *(f"kept: {why}" for why in self.reasons)])


def _describe(example: Any) -> Any:
    """Tensors as [shape, type]; JSON has no tuples, so calls are written as a pair."""
    args, kwargs = example
    note = lambda t: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
    return pytree.tree_map_only(Tensor, note, [list(args), dict(kwargs)])


def _rebuild(note: Any) -> Any:
    def value(x: Any) -> Any:
        if isinstance(x, dict) and set(x) == {"shape", "dtype"}:
            dtype = getattr(torch, x["dtype"])
            return (
                torch.randn(x["shape"]).to(dtype)
                if dtype.is_floating_point
                else torch.zeros(x["shape"], dtype=dtype)
            )
        if isinstance(x, dict):
            return {k: value(v) for k, v in x.items()}
        return [value(v) for v in x] if isinstance(x, list) else x

    args, kwargs = note
    return value(kwargs) if kwargs else tuple(value(a) for a in args)
