"""Which layers cost accuracy, and the override that would fix each.

Every layer is quantized alone. Its own SQNR measures the noise that it makes; the SQNR of the model's output measures
how much of it arrives. The two rank layers differently. The fix is tried on the spot: other observers of the same width
first, because they are free, then more bits, then float. The overrides that are suggested in the end were tried
together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError
from sparsebit.graph.ops import called_module
from sparsebit.graph.run.calls import Call
from sparsebit.quantization.analysis.fixes import Fix, find_fix, replaced
from sparsebit.quantization.analysis.groups import Group, Member, costliest
from sparsebit.quantization.analysis.text import labels, table
from sparsebit.quantization.layers import (
    active_quantizers,
    as_calls,
    carries_for,
    input_carriers,
    names_of,
    switched_on,
    undisturbed,
)
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Mode, Quantizer

SUGGESTED = 3  # overrides at most
GAIN = 0.5  # dB of the whole model that an override must bring beside the others, to be suggested
HARMLESS = 20.0  # dB above the whole model: a layer that makes less than 1 % of the noise needs no fix


class Noise:
    """Signal and noise energy of everything it is shown, in float64."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, quantized: Any, real: Any) -> None:
        for q, r in zip(pytree.tree_leaves(quantized), pytree.tree_leaves(real)):
            if isinstance(r, Tensor) and r.is_floating_point():
                self.signal += float(r.double().square().sum())
                self.noise += float((q.double() - r.double()).square().sum())

    @property
    def db(self) -> float:
        if self.noise == 0:
            return math.inf
        if self.signal:
            return 10 * math.log10(self.signal / self.noise)
        return -math.inf


@dataclass(frozen=True)
class LayerProfile:
    """One layer, quantized alone; all figures are SQNR in dB, more is better."""

    name: str
    path: str
    own: float  # of its own output
    effect: float  # of the model's output
    weight: float | None  # of its own output with only the weight quantized
    inputs: float | None  # with only the inputs quantized
    fix: str  # a line for the config; "" if nothing tried helps, or nothing needs help
    fixed: float | None  # of its own output with the fix, on the first batch


@dataclass(frozen=True, repr=False)
class Profile:
    """Rows by their effect on the output, the worst first. Print it, or take `as_dict()`."""

    model: str
    total: float  # SQNR of the output with everything quantized
    rows: list[LayerProfile]
    suggested: tuple[str, ...] = ()  # names of rows whose fixes help the whole model, tried together
    together: float | None = None  # SQNR of the output with these fixes
    group: Group | None = None  # the kind of quantizers that costs most as a whole

    @property
    def by_sqnr(self) -> list[LayerProfile]:
        """Rows by the SQNR of the layer's own output, the worst first."""
        return sorted(self.rows, key=lambda r: r.own)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rank = {row.name: str(i + 1) for i, row in enumerate(self.by_sqnr)}
        name = labels(self.rows)
        cells = []
        for r in self.rows:
            cells.append(
                [
                    name[r.name],
                    _db(r.effect),
                    _db(r.own),
                    rank[r.name],
                    _db(r.weight),
                    _db(r.inputs),
                    r.fix,
                    _db(r.fixed),
                ]
            )
        header = ["layer", "output", "own", "rank", "weight", "inputs", "fix", "with it"]
        return (
            f"profile of {self.model}: SQNR in dB, one layer quantized at a time; all of them: {_db(self.total)}\n"
            + table(header, cells, "lrrrrrlr")
            + "\n"
            + ("" if self.group is None else f"{self.group}\n")
            + self._suggestion()
        )

    def _suggestion(self) -> str:
        if not self.suggested:
            return (
                "no override of a few layers helps the whole model: try another preset, or more bits for all"
            )
        lines = []
        for name in self.suggested:
            for row in self.rows:
                if row.name == name:
                    lines.append(row.fix)
        return "\n".join([f"together {_db(self.total)} -> {_db(self.together)} dB with:", *lines])

    __repr__ = __str__


def _db(value: float | None) -> str:
    if value is None:
        return ""
    if value == math.inf:
        return "exact"
    return f"{value:.1f}"


# -- measuring --------------------------------------------------------------------------------------
def profile(qmodel: Any, batches: Any, *, progress: bool | None = None) -> Profile:
    """Rank the layers of a calibrated `qmodel` on `batches`, in any form calibrate() takes; one or two are enough.

    Runs the model once per layer and batch.
    """
    from sparsebit.utils.progress import tracked

    gm: fx.GraphModule = qmodel.model
    calls = as_calls(gm, [batches] if isinstance(batches, (Tensor, Mapping)) else batches)
    if not calls:
        raise CalibrationError("profile(): `batches` is empty; one batch is enough")
    units = list(_units(gm))
    with undisturbed(gm):
        real = [gm(*args, **kwargs) for args, kwargs in calls]
        total = Noise()
        with switched_on(q for unit in units for q in unit.quantizers):
            for (args, kwargs), out in zip(calls, real):
                total.add(gm(*args, **kwargs), out)
        found = []
        for unit in tracked(units, progress, "profiling"):
            found.append(_row(gm, unit, calls, real, _limits(qmodel)))
        found = [
            (r, fix) if r.effect < total.db + HARMLESS else (replace(r, fix="", fixed=None), None)
            for r, fix in sorted(found, key=lambda pair: pair[0].effect)
        ]
        suggested, together = _suggest(gm, units, found, calls, real, total.db)
        group = _costliest_group(gm, units, calls, real)
    rows = [row for row, _ in found]
    return Profile(type(gm).__name__, total.db, rows, suggested, together, group)


def _costliest_group(
    gm: fx.GraphModule, units: list[_Unit], calls: list[Call], real: list[Any]
) -> Group | None:
    members = []
    for unit in units:
        for quantizer, (name, owner) in unit.quantizers.items():
            members.append(Member(quantizer, owner, name, type(unit.op).__name__.removeprefix("Q")))

    def measure(on: Iterable[Quantizer]) -> float:
        noise = Noise()
        with switched_on(on):
            for (args, kwargs), out in zip(calls, real):
                noise.add(gm(*args, **kwargs), out)
        return noise.db

    def see() -> None:
        for args, kwargs in calls:
            gm(*args, **kwargs)

    return costliest(members, measure, see)


def _suggest(
    gm: fx.GraphModule,
    units: list[_Unit],
    found: list[tuple[LayerProfile, Fix | None]],
    calls: list[Call],
    real: list[Any],
    total: float,
) -> tuple[tuple[str, ...], float | None]:
    """The fixes that help the model beside each other, those of the worst layers first; and the SQNR with them."""
    owners = {q: owner for unit in units for q, (_, owner) in unit.quantizers.items()}
    chosen: list[tuple[str, Fix]] = []
    best = total
    candidates = [(row.name, fix) for row, fix in found if fix is not None and fix.old is not None]
    for name, fix in candidates[: 2 * SUGGESTED]:
        noise = Noise()
        with switched_on(q for unit in units for q in unit.quantizers), ExitStack() as stack:
            for _, each in [*chosen, (name, fix)]:
                assert each.old is not None
                stack.enter_context(replaced(each.old, each.new, owners[each.old]))
            for (args, kwargs), out in zip(calls, real):
                noise.add(gm(*args, **kwargs), out)
        if noise.db > best + GAIN:
            best = noise.db
            chosen.append((name, fix))
        if len(chosen) == SUGGESTED:
            break
    return tuple(name for name, _ in chosen), best if chosen else None


def _limits(qmodel: Any) -> dict[str, Any]:
    """The numbers of bits that the backend takes, for W and A; None: any."""
    from sparsebit.quantization.quant_config import backend_of

    return {letter: backend_of(qmodel.cfg).BITS.get(letter) for letter in "WA"}


@dataclass
class _Unit:
    """The parts that are quantized together: an op, its quantizers, and those of the QIdentities in front of it."""

    name: str
    path: str
    op: nn.Module
    quantizers: dict[Quantizer, tuple[str, QuantOpr]]  # the name that SPECIFIC knows, and the owner
    carriers: list[nn.Module]


def _units(gm: fx.GraphModule) -> Iterator[_Unit]:
    seen: set[Quantizer] = set()
    found: list[_Unit] = []
    for node in gm.graph.nodes:
        module = called_module(node, gm)
        if module is None or (isinstance(module, QIdentity) and carries_for(node) is not None):
            continue
        carried = input_carriers(node, gm)
        owned = {q: (names_of(node)[1], m) for q, m in _owned(module)}
        owned |= {q: (n.name, m) for n, c in carried for q, m in _owned(c)}
        found.append(_Unit(*names_of(node), module, owned, [m for _, m in carried]))
        for inside, inner in module.named_modules():
            if inner is not module:
                names = names_of(node, inside.removeprefix("root."))
                found.append(_Unit(*names, inner, {q: (names[1], m) for q, m in _owned(inner)}, []))
    paths = Counter(unit.path for unit in found)
    for unit in found:
        unit.quantizers = {q: owner for q, owner in unit.quantizers.items() if q not in seen}
        seen.update(unit.quantizers)
        if paths[unit.path] > 1:  # `matmul` twice in one forward
            own = {q: (unit.name, m) for q, (name, m) in unit.quantizers.items() if name == unit.path}
            unit.quantizers |= own
        if unit.quantizers:
            yield unit


def _owned(module: nn.Module) -> list[tuple[Quantizer, QuantOpr]]:
    if isinstance(module, QuantOpr):
        return [(q, module) for q in active_quantizers(module)]
    return []


def _row(
    gm: fx.GraphModule, unit: _Unit, calls: list[Call], real: list[Any], limits: dict[str, Any]
) -> tuple[LayerProfile, Fix | None]:
    effect = Noise()
    trial = _Trial(unit, limits)
    for (args, kwargs), out in zip(calls, real):
        with switched_on(unit.quantizers), trial.listening():
            effect.add(gm(*args, **kwargs), out)
    weight, inputs = (trial.noise[half].db if found else None for half, found in trial.halves.items())
    fix = trial.fix or Fix("", None)
    own = trial.noise["own"].db
    row = LayerProfile(unit.name, unit.path, own, effect.db, weight, inputs, fix.text, fix.db)
    return row, trial.fix


class _Trial:
    """Runs the op of one unit again and again on the inputs it gets, each time with other quantizers."""

    def __init__(self, unit: _Unit, limits: dict[str, Any]):
        self.unit = unit
        self.limits = limits
        weights = [q for q in unit.quantizers if q.observer.is_weight]
        self.halves = {"weight": weights, "inputs": [q for q in unit.quantizers if q not in weights]}
        self.noise = {name: Noise() for name in ("own", *self.halves)}
        self.fix: Fix | None = None
        self.tried = self.busy = False
        # id of a carrier's output -> it, and whence
        self.carried: dict[int, tuple[Tensor, nn.Module, Any]] = {}
        self.shown: dict[Quantizer, list[Tensor]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as handles:
            for carrier in self.unit.carriers:
                handles.callback(carrier.register_forward_hook(self._carry).remove)
            for quantizer in self.unit.quantizers:
                handles.callback(quantizer.register_forward_hook(self._show).remove)
            handles.callback(self.unit.op.register_forward_hook(self._compare, with_kwargs=True).remove)
            yield
        self.carried.clear()
        self.shown.clear()

    def _carry(self, module: nn.Module, args: Any, out: Any) -> None:
        if not self.busy:
            self.carried[id(out)] = (out, module, args[0])

    def _show(self, quantizer: Quantizer, args: Any, out: Any) -> None:
        if not self.busy and isinstance(args[0], Tensor):
            self.shown.setdefault(quantizer, []).append(args[0].detach().clone())

    def _compare(self, op: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self.busy:
            return
        self.busy = True
        try:
            run = lambda on: self._run(args, kwargs, on)
            real = run(())
            self.noise["own"].add(out, real)
            for half, quantizers in self.halves.items():
                if quantizers:
                    self.noise[half].add(run(quantizers), real)
            if not self.tried:
                self.tried = True
                self.fix = self._search(run, real)
        finally:
            self.busy = False

    def _run(self, args: Any, kwargs: Any, on: Iterable[Quantizer]) -> Any:
        """The op on the same inputs, with only these quantizers at work."""

        def again(x: Any) -> Any:
            _, carrier, source = self.carried.get(id(x), (None, None, None))
            return x if carrier is None else carrier(source)

        saved = {q: q.mode for q in self.unit.quantizers}
        try:
            for quantizer in saved:
                quantizer.mode = Mode.QUANT if quantizer in on else Mode.FLOAT
            args, kwargs = pytree.tree_map(again, (args, kwargs))
            return self.unit.op(*args, **kwargs)
        finally:
            for quantizer, mode in saved.items():
                quantizer.mode = mode

    def _search(self, run: Callable[[Iterable[Quantizer]], Any], real: Any) -> Fix | None:
        """Repair the quantizer that alone does the most damage."""

        def noise(on: Iterable[Quantizer]) -> float:
            heard = Noise()
            heard.add(run(on), real)
            return heard.db

        everything = list(self.unit.quantizers)
        worst = min(everything, key=lambda q: noise([q]))
        name, owner = self.unit.quantizers[worst]

        def score(new: Quantizer | None) -> float:
            if new is None:
                return noise([q for q in everything if q is not worst])
            correction = owner.bias_correction
            handle = worst.register_forward_hook(lambda q, args, out: out if new is q else new(args[0]))
            try:
                if new is not worst and worst.observer.is_weight:
                    owner.bias_correction = None  # it is for the old grid
                return noise(everything)
            finally:
                handle.remove()
                owner.bias_correction = correction

        equalized = owner.equalization is not None and not worst.observer.is_weight
        limits = self.limits[worst.cfg.letter]
        return find_fix(worst, name, self.shown.get(worst, []), limits, score, equalized)
