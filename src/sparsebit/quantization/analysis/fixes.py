"""The cheapest override that repairs a quantizer, found by trying: another observer, more bits, float."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sparsebit.errors import SparsebitError
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Mode, Quantizer, build_quantizer

OBSERVERS = {"A": ("minmax", "mean_minmax", "percentile", "mse"), "W": ("minmax", "mse")}
WIDTHS = (4, 8, 16)
# dB that make an override worth naming: a bit is 6 dB
FREE_GAIN = 3.0
BIT_GAIN = 6.0
GOOD = 20.0  # dB: below, noise is above 1 % of the signal, and an observer alone is not a repair
CLOSE = 1.0  # dB: as good as float, the rest of the noise is not this quantizer's


@dataclass(frozen=True)
class Fix:
    """`text` is a line for the config; `db` the SQNR of the layer's output with it.

    `old` is the quantizer that is repaired, `new` the one in its place; None: its values stay float.
    """

    text: str
    db: float | None
    old: Quantizer | None = None
    new: Quantizer | None = None


class _Tried(NamedTuple):
    new: Quantizer
    db: float


def find_fix(
    quantizer: Quantizer,
    name: str,
    data: list[Tensor],
    limits: Iterable[int] | None,
    score: Callable[[Quantizer | None], float],
    fixed_range: bool = False,
) -> Fix | None:
    """The override for `quantizer` of the layer `name`, or None if nothing helps.

    data         what the quantizer saw.
    limits       widths that the backend takes; None: any.
    score        SQNR of the layer's output with another quantizer in its place; None: with none.
    fixed_range  its range is not the observer's to choose (equalized).
    """
    letter = quantizer.cfg.letter
    # measured on the same data as the others, so that only the method differs
    again = _try(quantizer, [], data, score)
    now = max(score(quantizer), again.db if again is not None else -math.inf)
    best = None
    top = -math.inf
    for override in () if fixed_range else _free(quantizer, letter):
        tried = _try(quantizer, override, data, score)
        if tried is not None and tried.db > max(now + FREE_GAIN, top):
            best = Fix(_line(letter, name, override), tried.db, quantizer, tried.new)
            top = tried.db
    if best is not None and top > GOOD:
        return best
    in_float = score(None)
    for bits in (b for b in WIDTHS if b > quantizer.bit and (limits is None or b in limits)):
        tried = _try(quantizer, ["QUANTIZER.BIT", bits], data, score)
        if tried is None or tried.db <= now + FREE_GAIN:
            continue
        if tried.db > now + BIT_GAIN or tried.db > in_float - CLOSE:
            return Fix(_line(letter, name, ["QUANTIZER.BIT", bits]), tried.db, quantizer, tried.new)
    if best is None and in_float > now + FREE_GAIN:
        best = Fix(_line(letter, name, ["QUANTIZER.DISABLE", True]), in_float, quantizer)
    return best


def _free(quantizer: Quantizer, letter: str) -> Iterator[list[Any]]:
    """Overrides that cost nothing at run time."""
    if letter == "W" and not quantizer.is_perchannel:
        yield ["QSCHEME", f"per-channel-{'symmetric' if quantizer.is_symmetric else 'affine'}"]
    for observer in OBSERVERS[letter]:
        if observer != quantizer.observer.TYPE:
            yield ["OBSERVER.TYPE", observer]


def _try(
    quantizer: Quantizer, override: list[Any], data: list[Tensor], score: Callable[[Quantizer | None], float]
) -> _Tried | None:
    """The quantizer with the override, and its SQNR; None if it does not go with the rest of the config."""
    new = new_quantizer(quantizer, override, data)
    return None if new is None else _Tried(new, score(new))


def new_quantizer(quantizer: Quantizer, override: list[Any], data: Iterable[Tensor]) -> Quantizer | None:
    """The quantizer with the override, calibrated on `data`; None if it does not go with the rest of the config."""
    try:
        new = build_quantizer(quantizer.cfg.override(*override))
        new.to(quantizer.scale.device)
        new.set_ch_axis(quantizer.ch_axis)
        new.qdesc.set_group(quantizer.qdesc.group)
        new.qdesc.set_symmetric(quantizer.is_symmetric)
        if "QSCHEME" not in override:
            new.qdesc.is_perchannel = quantizer.is_perchannel
        for x in data:
            new.update_observer(x)
        new.calc_qparams()
    except SparsebitError:
        return None
    new.mode = Mode.QUANT
    return new


def _line(letter: str, name: str, override: list[Any]) -> str:
    return f"{letter}.SPECIFIC: [{json.dumps({name: override})}]"


@contextmanager
def replaced(old: Quantizer, new: Quantizer | None, owner: QuantOpr) -> Iterator[None]:
    """Inside, `new` does the work of `old`, a quantizer of `owner`; with None, values stay float."""
    correction = owner.bias_correction

    def instead(quantizer: Quantizer, args: Any, out: Any) -> Any:
        return args[0] if new is None else new(args[0])

    handle = old.register_forward_hook(instead)
    try:
        if old.observer.is_weight:
            owner.bias_correction = None  # it is for the old grid
        yield
    finally:
        handle.remove()
        owner.bias_correction = correction
