"""Plan: the channels that a cut keeps, as plain data. It can be printed, saved and applied to a copy of the
same model."""

from __future__ import annotations

import base64
import inspect
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsebit.errors import SparsebitError
from sparsebit.graph.run.calls import CPU, device_of, to_device
from sparsebit.graph.trace import unwrapped
from sparsebit.sparse.cut.compact import compact
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.depth.shallower import shallower
from sparsebit.sparse.labels.walk import Walk, walk_of
from sparsebit.sparse.sparse_config import Heads
from sparsebit.sparse.trace.front_end import check_model
from sparsebit.utils.files import write_whole

VERSION = 1


@dataclass
class Plan:
    """kept: parameter path -> axis -> kept positions; sizes: the shapes before the cut."""

    kept: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)  # of the example, to trace again
    reasons: list[str] = field(default_factory=list)  # why some channels could not be removed
    makes: dict[str, int] = field(default_factory=dict)  # the axis of the channels that a layer makes
    heads: Heads = "whole"
    # blocks that were merged into the next one, before channels were removed
    merged: list[str] = field(default_factory=list)
    shortened: list[str] = field(default_factory=list)  # branches that a linear layer replaces
    as_written: bool | None = None  # is the result of the model's class, or a graph? None: unknown

    @classmethod
    def of(cls, cut: Cut) -> Plan:
        plan = cls(reasons=sorted(set(cut.walk.labels.why_fixed.values())), heads=cut.walk.heads)
        for part in cut.walk.slices.values():
            keeps = cut.keeps(part.labels)
            if not bool(keeps.all()):
                plan.kept.setdefault(part.path, {})[part.axis] = keeps.nonzero().flatten().tolist()
        made = {part.path: part.axis for part in cut.walk.slices.values() if part.produces}
        plan.makes = {path: made[path] for path in plan.kept if path in made}
        plan.sizes = {path: list(cut.walk.tensor(path).shape) for path in plan.kept}
        args, kwargs = cut.walk.example
        plan.inputs = [_describe([list(args), kwargs])]
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
            kept = {}
            for k, axes in body.pop("kept").items():
                kept[k] = {int(a): list(map(int, i)) for a, i in axes.items()}
            return cls(kept=kept, **body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SparsebitError(f"{path}: is not a pruning plan of this version: {error}") from None

    def apply(self, model: nn.Module, example: Any = None) -> nn.Module:
        """A copy of `model` with the same cut. Weights that were saved from the pruned model load into it."""
        model = unwrapped(model)
        check_model(model)
        if example is None:
            example = self._example(model)
        model, _ = shallower(model, example, self.merged, self.shortened)
        walk = walk_of(model, example, self.heads)
        small = compact(model, Cut(walk, self.dropped(walk)), self.as_written).model
        small.pruning_plan = self  # type: ignore[assignment]
        return small

    def _example(self, model: nn.Module) -> inspect.BoundArguments:
        """A call like the example of the plan."""
        device = device_of(model) or CPU
        args, kwargs = to_device(_rebuild(self.inputs[0]), device)
        signature = inspect.signature(model.forward)
        try:
            return signature.bind(*args, **kwargs)
        except TypeError as error:
            raise SparsebitError(
                f"the plan is of another model: its example does not fit forward{signature}: {error}"
            ) from None

    def dropped(self, walk: Walk) -> Tensor:
        """The classes of `walk` that this plan removes."""
        found = []
        have = dict([*walk.gm.named_parameters(remove_duplicate=False), *walk.gm.named_buffers()])
        for path, axes in self.kept.items():
            shape = None
            if path in have:
                shape = list(have[path].shape)
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

    def _side(self, path: str, name: str, axis: int) -> str:
        """The user's word for an axis of a weight; "" for an axis that repeats another one."""
        if name == "weight":
            if self.makes.get(path) == axis:
                return "out"
            if path in self.makes or axis:
                return "in"
            return " "
        if axis == 1:
            return {"weight_ih_l0": "in", "weight_hh_l0": "hidden"}.get(name, "")
        return ""

    def __str__(self) -> str:
        rows: dict[str, dict[str, str]] = {}
        for path, axes in self.kept.items():
            module, _, name = path.rpartition(".")
            for axis, kept in axes.items():
                if side := self._side(path, name, axis):
                    before = self.sizes[path][axis]
                    rows.setdefault(module, {})[side] = f"{side.strip()} {before} -> {len(kept)}".lstrip()
        width = max(map(len, rows), default=0)
        lines = [
            f"{module:{width}s}  {', '.join(v for _, v in sorted(s.items()))}" for module, s in rows.items()
        ]
        lines += [f"{name}: side by side with the block behind it" for name in self.merged]
        lines += [f"{name}: a linear layer stands in for it" for name in self.shortened]
        return "\n".join([*lines, *(f"kept: {why}" for why in self.reasons)])


def compact_with_plan(model: nn.Module, cut: Cut, as_written: bool | None = None) -> nn.Module:
    """The smaller model; its attribute `pruning_plan` is the plan of the cut."""
    made = compact(model, cut, as_written)
    plan = Plan.of(cut)
    plan.as_written = made.as_written
    plan.reasons += made.reasons
    made.model.pruning_plan = plan  # type: ignore[assignment]
    return made.model


def _describe(value: Any) -> Any:
    """The value as JSON, which has no tensors and tuples.

    Of float tensors only shape and type are stored. Token ids and lengths are stored whole, because the
    forward may depend on them.
    """
    if isinstance(value, Tensor):
        note = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if not value.is_floating_point() and value.numel():
            raw = bytes(value.detach().cpu().reshape(-1).view(torch.uint8).tolist())
            note["packed"] = base64.b64encode(zlib.compress(raw)).decode()
        return note
    if isinstance(value, Mapping):
        return {str(k): _describe(v) for k, v in value.items()}
    if isinstance(value, PackedSequence):
        return {"packed sequence of": [_describe(v) for v in value]}
    if type(value) is tuple:
        return {"tuple of": [_describe(v) for v in value]}
    if isinstance(value, list):
        return [_describe(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"no JSON": repr(value)}


def _rebuild(note: Any) -> Any:
    if isinstance(note, list):
        return [_rebuild(v) for v in note]
    if not isinstance(note, dict):
        return note
    if {"shape", "dtype"} <= set(note):
        dtype = getattr(torch, note["dtype"])
        if "packed" in note:
            raw = bytearray(zlib.decompress(base64.b64decode(note["packed"])))
            return torch.frombuffer(raw, dtype=dtype).view(note["shape"])
        if dtype.is_floating_point:
            return torch.randn(note["shape"]).to(dtype)
        return torch.zeros(note["shape"]).to(dtype)
    if set(note) == {"tuple of"}:
        return tuple(_rebuild(v) for v in note["tuple of"])
    if set(note) == {"packed sequence of"}:
        return PackedSequence(*map(_rebuild, note["packed sequence of"]))
    if set(note) == {"no JSON"}:
        raise SparsebitError(
            f"the plan cannot hold {note['no JSON']}, which was in the example; call apply(model, example)"
        )
    return {k: _rebuild(v) for k, v in note.items()}
