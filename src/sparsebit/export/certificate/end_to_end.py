"""Two runs of one model on the same batches: how far their outputs are apart, each output by itself.

A file is compared with the model it was made from, and the model with itself when its input moves by 1e-5: the
model's own noise floor. No runtime can be asked to be nearer than that. Labels that flip are few and random, so the
input is moved in three ways, and the highest of the three counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.export.certificate import runtime
from sparsebit.export.certificate.parts import Part, Parts
from sparsebit.export.certificate.runtime import Array
from sparsebit.graph.run.calls import Call

FLOAT_ROUNDING = 1e-4  # of the largest value: two runtimes add in different order
NOISE = 1e-5
DRAWS = 3  # of noise
AS_USERS_RUN_IT = "as users run it"  # sessions of onnxruntime
BARE = "unoptimised"
HUGE = 1e4  # masks hold numbers such as -1e9 beside 0
Rows = list[tuple[str, str]]
Shape = tuple[int, ...]


def class_axis(shape: Shape, targets: Sequence[Shape] = ()) -> int | None:
    """The axis of the classes in an output.

    Targets have the shape of the output without that axis; both are compared behind the axis of the batch. Without
    such a target the shape decides: axis 1 of (N, C) and of pictures (N, C, H, W), the last of tokens (N, L, C).
    """
    if len(shape) < 2:
        return None
    usual = 2 if len(shape) == 3 else 1
    for axis in (usual, *range(1, len(shape))):
        if shape[1:axis] + shape[axis + 1 :] in targets and shape[axis] > 1:
            return axis
    return usual if shape[usual] > 1 else None


@dataclass
class OutputNoise:
    """One output of two runs of a model."""

    signal: float = 0.0
    moving: float = 0.0  # the part of the signal that changes with the input: anchors of boxes do not
    noise: float = 0.0
    largest: float = 0.0
    axis: int | None = None  # of the classes
    labels: int = 0
    labels_differ: int = 0
    holds_labels: bool = False  # whole numbers, such as classes or indices: right or wrong, but not near
    last: Array | None = field(default=None, repr=False)
    guess: float = 0.0  # in `moving`, of a single input: until there is another one

    def add(self, expected: Array, got: Array, targets: Sequence[Shape] = ()) -> None:
        if expected.shape != got.shape:
            self.noise = self.largest = float("inf")
            return
        apart = difference(expected, got)
        finite = np.nan_to_num(expected, posinf=0, neginf=0).astype(np.float64)
        self.signal += float((finite**2).sum())
        self.moving += self._moving(finite)
        self.noise += float((apart**2).sum())
        self.largest = max(self.largest, float(apart.max(initial=0)))
        self.holds_labels = is_whole(expected)
        if self.holds_labels:
            self.axis = None
        else:
            self.axis = class_axis(expected.shape, targets)
        if self.holds_labels:
            self.labels += apart.size
            self.labels_differ += int((apart > 0).sum())
        elif self.axis is not None:
            a = expected.argmax(self.axis)
            b = got.argmax(self.axis)
            self.labels += a.size
            self.labels_differ += int((a != b).sum())

    def _moving(self, x: Array) -> float:
        """The part that moves: of several inputs the difference from their mean, of a single one the difference from
        the one before."""
        if x.ndim and x.shape[0] > 1:
            return float(((x - x.mean(0)) ** 2).sum())
        before = self.last
        self.last = x
        if before is None or before.shape != x.shape:
            self.guess = float(((x - x.mean()) ** 2).sum()) if x.size else 0.0
            return self.guess
        apart = float(((x - before) ** 2).sum()) / 2
        guess = self.guess
        self.guess = 0.0
        return apart + (apart - guess if guess else 0.0)

    @property
    def noise_db(self) -> float:
        """Noise against signal: the lower the better; -inf is equal."""
        return _decibels(self.noise, self.signal)

    @property
    def moving_db(self) -> float:
        """The part of the outputs that changes with the input, in dB of the whole signal: 0 or less."""
        return min(_decibels(self.moving, self.signal), 0.0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "noise_db": self.noise_db,
            "largest_difference": self.largest,
            "class_axis": self.axis,
            "labels": self.labels,
            "labels_differ": self.labels_differ,
        }

    def __str__(self) -> str:
        labels = ""
        if self.holds_labels:
            return f"{self.labels_differ} of {self.labels} values differ"
        if self.labels:
            labels = f", {self.labels_differ} of {self.labels} labels differ (classes on axis {self.axis})"
        if self.noise_db == float("-inf"):
            return f"exact{labels}"
        return f"{self.noise_db:.1f} dB, largest difference {self.largest:.2g}{labels}"


def is_whole(x: Array) -> bool:
    """Whole numbers or truth values: two of them are equal or not."""
    return x.dtype.kind in "iub"


def _decibels(part: float, whole: float) -> float:
    if not part:
        return float("-inf")
    return float(10 * np.log10(part / whole)) if whole else float("inf")


@dataclass
class EndToEnd:
    """All outputs of two runs of the same model on the same batches, by name."""

    outputs: dict[str, OutputNoise] = field(default_factory=dict)
    quiet: dict[str, OutputNoise] = field(default_factory=dict)  # parts of outputs that the rest would drown
    parts: Parts = field(default_factory=Parts, repr=False)
    targets: Sequence[Shape] = ()  # of the batches, without the axis of the batch

    def add(self, names: Sequence[str], expected: list[Array], got: list[Array]) -> None:
        """One batch."""
        for i, name in enumerate(names):
            output = self.outputs.setdefault(name, OutputNoise())
            if i < min(len(expected), len(got)):
                output.add(expected[i], got[i], self.targets)
                self._add_parts(name, expected[i], got[i])
        if len(expected) != len(got):
            extra = self.outputs.setdefault("the number of outputs", OutputNoise())
            extra.noise = extra.largest = float("inf")

    def _add_parts(self, name: str, expected: Array, got: Array) -> None:
        for part in self.parts.of(name, expected):
            if part.fits(expected, got):
                noise = self.quiet.setdefault(part.name_in(name), OutputNoise())
                noise.add(part.of(expected), part.of(got))

    def of(self, name: str) -> OutputNoise:
        """An output, or a part of one."""
        return self.outputs.get(name) or self.quiet.get(name) or OutputNoise()

    @property
    def worst(self) -> OutputNoise:
        """The output that is furthest away."""
        return max(self.outputs.values(), key=lambda o: (o.noise_db, o.labels_differ), default=OutputNoise())

    @property
    def noise_db(self) -> float:
        return self.worst.noise_db

    @property
    def largest(self) -> float:
        return max((o.largest for o in self.outputs.values()), default=0.0)

    @property
    def labels(self) -> int:
        return sum(o.labels for o in self.outputs.values())

    @property
    def labels_differ(self) -> int:
        return sum(o.labels_differ for o in self.outputs.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "noise_db": self.noise_db,
            "largest_difference": self.largest,
            "labels": self.labels,
            "labels_differ": self.labels_differ,
            "outputs": {name: output.as_dict() for name, output in self.outputs.items()},
        }

    def __str__(self) -> str:
        if len(self.outputs) < 2:
            return str(self.worst)
        name = next(name for name, output in self.outputs.items() if output is self.worst)
        return f"{self.worst} in {name}, the furthest of {len(self.outputs)} outputs"


@dataclass
class Comparison:
    """The common part of all certificates: the file against the model, and the model against itself."""

    runtime: EndToEnd = field(default_factory=EndToEnd)  # the session that decides
    session: str = AS_USERS_RUN_IT  # which that is
    floors: list[EndToEnd] = field(default_factory=lambda: [EndToEnd() for _ in range(DRAWS)])
    rounding: float = FLOAT_ROUNDING  # half precision rounds more, and then over more boundaries
    parts: Parts = field(default_factory=Parts, repr=False)

    def __post_init__(self) -> None:
        for run in (self.runtime, *self.floors):
            run.parts = self.parts

    @property
    def floor(self) -> EndToEnd:
        """The highest of the draws."""
        return max(self.floors, key=lambda draw: (draw.labels_differ, draw.noise_db))

    def floor_of(self, name: str) -> OutputNoise:
        """The highest of the draws for one output."""
        draws = [draw.of(name) for draw in self.floors]
        return max(draws, key=lambda o: (o.noise_db, o.labels_differ))

    def see_targets(self, targets: Sequence[Shape]) -> None:
        """The shapes of the targets in the batches: they say on which axis the classes are."""
        for run in (self.runtime, *self.floors):
            run.targets = targets

    def add_moved(self, names: Sequence[str], expected: list[Array], moved: list[list[Array]]) -> None:
        for draw, outputs in zip(self.floors, moved):
            draw.add(names, expected, outputs)

    def failures(self) -> list[str]:
        """The failed checks, in the order of the graph: the first one is the start of the error."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Remarks on a certificate that holds."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        draws = {"draws": [{"noise_db": d.noise_db, "labels_differ": d.labels_differ} for d in self.floors]}
        return {
            "session": self.session,
            "end_to_end": self.runtime.as_dict(),
            "noise_floor": {**self.floor.as_dict(), **draws},
        }

    def rows(self) -> Rows:
        """Its own lines of the report."""
        raise NotImplementedError


def rounding_of(model: nn.Module) -> float:
    """The difference that two runtimes may have, as a share of the largest value."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(FLOAT_ROUNDING, 8 * max((torch.finfo(kind).eps for kind in kinds), default=0.0))


def answers(
    model: nn.Module, loaded: Any, calls: Iterable[Call], layers: Iterable[nn.Module]
) -> Iterator[tuple[list[Array], list[Array], list[list[Array]]]]:
    """For each call: what the model answers, what the file does, and what the model does on moved inputs.

    The caller has put the model into the mode in which it is compared; `layers` may be lookups of words.
    """
    layers = list(layers)
    for call in calls:
        expected = runtime.torch_outputs(call.run(model))
        got = runtime.run(loaded, runtime.feeds(loaded, *call))
        moved = []
        for seed in range(DRAWS):
            with disturbed_lookups(layers, seed):
                moved.append(runtime.torch_outputs(disturbed(call, seed).run(model)))
        yield expected, got, moved


def difference(a: Array, b: Array) -> Array:
    """|a - b|; equal infinities and NaN in the same place are no difference, NaN in one of them is infinite."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(np.float64) - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.nan_to_num(np.where(same, 0.0, apart), nan=np.inf, posinf=np.inf)  # an array, also of a number


def check_output(expected: list[Array], got: list[Array]) -> float:
    """The largest difference as a share of the largest value; of whole numbers, the share that differs."""
    if [e.shape for e in expected] != [g.shape for g in got]:
        return float("inf")
    worst = 0.0
    for e, g in zip(expected, got):
        if e.size and is_whole(e):
            worst = max(worst, float((difference(e, g) > 0).mean()))
        elif e.size:
            worst = max(worst, float(difference(e, g).max()) / max(largest_of(e), 1e-12))
    return worst


def check_part(part: Part, expected: Array, got: Array, least: float) -> float:
    """Check a part in the same way; `least` is a share of the largest value of the whole output, below which no size
    counts."""
    if not part.fits(expected, got):
        return 0.0  # the check of the whole output reports it
    size = max(largest_of(part.of(expected)), least * largest_of(expected), 1e-12)
    return float(difference(part.of(expected), part.of(got)).max(initial=0)) / size


def largest_of(x: Array) -> float:
    """The largest finite size."""
    return float(np.abs(np.nan_to_num(x, posinf=0, neginf=0)).max(initial=0))


def disturbed(value: Any, seed: int = 0) -> Any:
    """The arguments with noise on floats: 1e-5 of the largest value; for huge values, 1e-5 of each."""
    generator = torch.Generator().manual_seed(seed)

    def move(x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.numel():
            return x
        noise = torch.randn(x.shape, generator=generator).to(x) * NOISE
        is_huge = ~(x.abs() <= HUGE)
        size = x.abs().masked_fill(is_huge, 0).max().clamp_min(1e-12)
        moved = torch.where(is_huge, x * (1 + noise), x + noise * size)
        return torch.where(moved.isfinite(), moved, x)

    return pytree.tree_map_only(Tensor, move, value)


@contextmanager
def disturbed_lookups(layers: Iterable[nn.Module], seed: int = 0) -> Iterator[None]:
    """Words are no floats that could be moved: move what the first layers make of them."""

    def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_lookup = given and not any(t.is_floating_point() for t in given)
        return disturbed(out, seed) if is_lookup else out

    handles = [m.register_forward_hook(move, with_kwargs=True) for m in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
