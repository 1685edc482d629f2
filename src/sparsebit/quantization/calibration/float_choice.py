"""Which parts of a network are computed in float, because integers harm its outputs too much.

Calibration measures the outputs on a few samples: of the float model, of the quantized one, and of the quantized
one with one kind of float form. A kind is taken if it brings as many dB as it costs time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from sparsebit.graph.run.calls import Call
from sparsebit.quantization.calibration.output_noise import decibels, noise, outputs
from sparsebit.quantization.converters.float_attention import float_attention
from sparsebit.quantization.converters.float_forms import FloatForm, float_forms
from sparsebit.quantization.modules import quant_mode
from sparsebit.quantization.quantizers import Mode

log = logging.getLogger("sparsebit")
A_BIT = 6.0  # dB
GOOD_ENOUGH = 20.0  # dB: outputs so close to those of the float model stay integer, and fast
# in the meta of the graph, for the report
NOTE = "float_forms"
ATTENTION_NOTE = "float_attention"


@dataclass(frozen=True)
class Kind:
    """Float forms that are taken together."""

    note: str  # the key of the sentence about it in the meta of the graph
    find: Callable[[fx.GraphModule], list[FloatForm]]
    least: float  # dB that it must bring on the outputs
    good_enough: float  # dB: where the integers are this good, it is not tried
    says: str


def kinds() -> list[Kind]:
    attention = (
        "the probabilities of {count} attentions are multiplied in float: +{gain:.1f} dB on the calibration data. "
        "SCHEDULE.FLOAT_FORMS: false keeps these products integer"
    )
    activations = (
        "the activations of {count} convolutions, and depthwise convolutions beside them, are computed in float: "
        "+{gain:.1f} dB on the calibration data. SCHEDULE.FLOAT_FORMS: false keeps them integer, which is faster"
    )
    return [
        Kind(ATTENTION_NOTE, float_attention, 1.5, math.inf, attention),
        Kind(NOTE, float_forms, A_BIT, GOOD_ENOUGH, activations),
    ]


def forget_float_forms(gm: fx.GraphModule) -> None:
    """A new calibration chooses again."""
    for kind in kinds():
        gm.meta.pop(kind.note, None)


@torch.no_grad()
def choose_float_forms(gm: fx.GraphModule, calls: Sequence[Call]) -> float:
    """Take the kinds that bring enough on the outputs for `calls`; returns how many dB they bring together."""
    found = [(kind, kind.find(gm)) for kind in kinds()]
    found = [(kind, forms) for kind, forms in found if forms]
    if not found or not calls:
        return 0.0
    wanted = [outputs(gm, call) for call in calls]
    gained = 0.0
    with quant_mode(gm, w=True, a=True):
        before = noise(wanted, [outputs(gm, call) for call in calls])
        for kind, forms in found:
            if not before or decibels(before) > kind.good_enough:
                continue
            with _off(forms):
                after = noise(wanted, [outputs(gm, call) for call in calls])
            gain = decibels(after) - decibels(before) if after else 0.0
            if gain < kind.least:
                continue
            for form in forms:
                form.apply()
            gm.meta[kind.note] = kind.says.format(count=len(forms), gain=gain)
            log.info("%s", gm.meta[kind.note])
            gained += gain
            before = after
    return gained


@contextmanager
def _off(forms: Sequence[FloatForm]) -> Iterator[None]:
    quantizers = []
    for form in forms:
        for q in form.quantizers:
            quantizers.append((q, q.mode))
    try:
        for quantizer, _ in quantizers:
            quantizer.mode = Mode.FLOAT
        yield
    finally:
        for quantizer, mode in quantizers:
            quantizer.mode = mode
