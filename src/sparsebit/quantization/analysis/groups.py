"""Which kind of quantizer costs most, as a whole: "inputs of 23 depthwise convolutions, per tensor: 5.2 dB".

A single layer shows little if its whole kind is the cause. All quantizers of one kind are switched off together. The
kind whose absence helps the output most is then repaired as a whole, in the ways that a config can ask for. The best of
these is measured with everything else quantized, and offered with its figure.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsebit.quantization.analysis.fixes import OBSERVERS, new_quantizer, replaced
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.modules.conv import is_depthwise
from sparsebit.quantization.quantizers import Quantizer

GAIN = 0.5  # dB of the model's output that make a group, or its repair, worth naming
Measure = Callable[[Iterable[Quantizer]], float]  # SQNR of the output with these quantizers switched on


@dataclass(frozen=True)
class Group:
    """Quantizers of one kind: what they cost together, and the override that helps."""

    what: str  # "inputs of 23 depthwise convolutions, per tensor"
    cost: float  # dB that the output gains without them
    fix: str = ""  # lines for the config; "" if nothing tried helps
    fixed: float | None = None  # SQNR of the output with the fix

    def __str__(self) -> str:
        text = f"costs most: {self.what}: {self.cost:.1f} dB"
        if not self.fix:
            return text
        return f"{text}; all together {self.fixed:.1f} dB with:\n{self.fix}"


@dataclass
class Member:
    """A quantizer, its layer, and the name that SPECIFIC knows."""

    quantizer: Quantizer
    owner: QuantOpr
    name: str
    op: str


def costliest(members: Sequence[Member], measure: Measure, see: Callable[[], Any]) -> Group | None:
    """The group that costs most, and its repair. `see` runs the float model once, so that quantizers see values."""
    everything = [m.quantizer for m in members]
    total = measure(everything)
    kinds: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        kinds[_kind(member)].append(member)
    costs = {}
    for kind, found in kinds.items():
        off = {m.quantizer for m in found}
        costs[kind] = measure(q for q in everything if q not in off) - total
    if not costs or max(costs.values()) < GAIN:
        return None
    worst = max(costs, key=costs.__getitem__)
    found = kinds[worst]
    if len(found) > 1:
        what = worst.format(count=len(found))
    else:
        what = f"{found[0].name}, {worst.format(count=1)}"
    fix, fixed = _repair(found, total, lambda: measure(everything), see)
    return Group(what, costs[worst], fix, fixed)


def _kind(member: Member) -> str:
    quantizer = member.quantizer
    half = "inputs"
    if quantizer.observer.is_weight:
        half = "weights"
    op = member.op
    if is_depthwise(member.owner):
        op = "depthwise convolution"
    scheme = "per channel" if quantizer.is_perchannel else "per tensor"
    return f"{half} of {{count}} x {op}, {scheme}, {quantizer.bit} bits"


def _repair(
    members: Sequence[Member], total: float, measure: Callable[[], float], see: Callable[[], Any]
) -> tuple[str, float | None]:
    """The override of the whole group that brings most, and the SQNR of the output with it."""
    first = members[0].quantizer
    letter = first.cfg.letter
    with _shown(members) as values:
        see()
    best = ""
    fixed = total + GAIN
    for name in OBSERVERS[letter]:
        found = _with_override(members, ["OBSERVER.TYPE", name], values, measure)
        if found is not None and found[1] > fixed:
            best, fixed = found
    if not best:  # it costs time, so it comes last
        found = _with_override(members, ["QUANTIZER.DISABLE", True], values, measure)
        if found is not None and found[1] > fixed:
            best, fixed = found
    return best, fixed if best else None


def _with_override(
    members: Sequence[Member],
    way: list[Any],
    values: Mapping[Quantizer, list[Tensor]],
    measure: Callable[[], float],
) -> tuple[str, float] | None:
    """The line of the config, and the SQNR of the output with it; None if one of the layers does not take it."""
    names: dict[str, None] = {}
    with ExitStack() as stack:
        for member in members:
            old = member.quantizer
            new = None
            if way[0] != "QUANTIZER.DISABLE":
                if member.owner.equalization is not None and not old.observer.is_weight:
                    continue  # its range is not the observer's to choose
                new = new_quantizer(old, way, values.get(old, []))
                if new is None:
                    return None
            stack.enter_context(replaced(old, new, member.owner))
            names[member.name] = None
        found = measure()
    overrides = [{name: way} for name in names]
    return f"{members[0].quantizer.cfg.letter}.SPECIFIC: {json.dumps(overrides)}", found


@contextmanager
def _shown(members: Sequence[Member]) -> Iterator[dict[Quantizer, list[Tensor]]]:
    """What the quantizers are given inside the block."""
    values: dict[Quantizer, list[Tensor]] = defaultdict(list)

    def keep(quantizer: Quantizer, args: Any, out: Any) -> None:
        if isinstance(args[0], Tensor):
            values[quantizer].append(args[0].detach().clone())

    with ExitStack() as handles:
        for member in members:
            handles.callback(member.quantizer.register_forward_hook(keep).remove)
        yield values
