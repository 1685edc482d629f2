"""The certificate: the file is run and compared with the model that was measured.

(a) locally, optimisation off: the codes of every quantizer are computed again from the runtime's input to it, and every
op between two quantizers is computed again in torch from the runtime's values. So a flipped code upstream can neither
hide nor fake an error; (b) end to end, in a plain session, as a user loads the file, every output by itself.

(b) must be within one of three limits: 6 dB above the model's own noise floor (how far its output moves when its
input moves by 1e-5); 6 dB below the error of quantization itself, so that the file is at most 1 dB less accurate than
the model that was measured; 40 dB below the part of the output that changes with the input. Labels likewise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsebit.export.certificate.end_to_end import (
    FLOAT_ROUNDING,
    Comparison,
    EndToEnd,
    OutputNoise,
    Rows,
    Shape,
)
from sparsebit.export.certificate.local_output import MORE_LABELS, LocalOutput
from sparsebit.export.certificate.runtime import Array
from sparsebit.export.onnx.marks import Mark
from sparsebit.numeric import broadcast, dequantize, minmax_from_qparams, quantize_to_int

if TYPE_CHECKING:
    from sparsebit.export.onnx.lowered import Site

ON_GRID = 1e-3  # of a step: values that a quantizer gives lie on its grid
MOST_AT_BOUNDARY = 1e-4  # of all codes: values that float rounding moves over a boundary
ABOVE_FLOOR = 6.0  # dB
BELOW_QUANTIZATION = 6.0  # dB: errors that add up to 1 dB
# dB of what changes with the input: what MatMulNBits adds, which rounds activations to 8 bits, is below it
QUIET = -40.0
LOUD = -10.0  # dB: a limit above this lets much pass


@dataclass
class QuantizerCheck:
    """One quantizer, over all calls and batches."""

    name: str
    codes: int = 0
    wrong: int = 0  # other codes than the grid gives for the runtime's own input: must be 0
    at_boundary: int = 0  # other codes than torch's own input gives: float rounding, must be rare
    op_error: float = 0.0  # largest difference before rounding, as a share of the largest value
    shapes: str = ""  # of its input, where it is not the model's

    @property
    def share_at_boundary(self) -> float:
        return self.at_boundary / max(self.codes, 1)

    def compare(self, mark: Mark, mine: Tensor, before: Array, after: Array, site: Site) -> Tensor:
        """`mine` is torch's input to the quantizer, `before` and `after` what the runtime had there.

        Returns `after`: the next ops are checked on the runtime's own values.
        """
        theirs = torch.from_numpy(before.copy()).to(mine.device).float()
        result = torch.from_numpy(after.copy()).to(mine) / site.factor
        if theirs.shape != mine.shape or result.shape != mine.shape:
            self.wrong += max(mine.numel(), 1)
            self.shapes = f"{tuple(theirs.shape)}; the model's is {tuple(mine.shape)}"
            return result if result.shape == mine.shape else mine
        theirs = theirs + site.shift
        if site.clip != (None, None):
            theirs = theirs.clamp(*site.clip)
        code = lambda x: quantize_to_int(x.float(), mark.qparams, mark.spec)
        stored = code(result)
        self.codes += stored.numel()
        is_wrong = (code(theirs) != stored) | ~self._is_on_grid(mark, result, stored)
        self.wrong += int(is_wrong.sum())
        self.at_boundary += int((code(mine) != stored).sum())
        if mine.numel():
            self.op_error = max(self.op_error, self._op_error(mark, mine.float(), theirs, site.hoisted))
        return result

    @staticmethod
    def _is_on_grid(mark: Mark, result: Tensor, codes: Tensor) -> Tensor:
        """Are the values those that the codes stand for? Another scale for reading than for writing shows here."""
        values = dequantize(codes, mark.qparams, mark.spec)
        step = broadcast(mark.qparams.scale, result.dim(), mark.spec.axis).to(values)
        rounding = 2 * torch.finfo(result.dtype).eps * values.abs()
        return (result.to(values) - values).abs() <= ON_GRID * step + rounding

    @staticmethod
    def _op_error(mark: Mark, mine: Tensor, theirs: Tensor, hoisted: bool) -> float:
        """How far the values before rounding are apart; what gets the lowest or the highest code may differ."""
        axis = mark.spec.axis
        half = broadcast(mark.qparams.scale, mine.dim(), axis).to(mine) / 2
        low, high = (broadcast(v, mine.dim(), axis) for v in minmax_from_qparams(mark.qparams, mark.spec))
        clamp = lambda x: torch.minimum(torch.maximum(x, low.to(x) + half), high.to(x) - half)
        apart = (clamp(mine) - clamp(theirs)).abs()
        if hoisted:  # theirs are on the grid already: half a step is due
            apart = (apart - half * 1.0001).clamp_min(0)
        apart = apart.masked_fill(mine.isnan() & theirs.isnan(), 0).nan_to_num(nan=float("inf"))
        return float(apart.max()) / max(float(clamp(mine).abs().nan_to_num().max()), 1e-12)


@dataclass
class Certificate(Comparison):
    """The comparisons of a quantized model with its file, and their result."""

    quantizers: dict[str, QuantizerCheck] = field(default_factory=dict)
    wrong_biases: Counter[str] = field(default_factory=Counter)  # by weight quantizer: values off the model's
    local_outputs: dict[str, LocalOutput] = field(default_factory=dict)  # of (a)
    local_parts: dict[str, LocalOutput] = field(default_factory=dict)  # parts that the rest would drown
    output_count: str = ""  # where it is not the model's
    output_types: dict[str, str] = field(default_factory=dict)  # of those with another type or shape
    order: list[str] = field(default_factory=list)
    quantization: EndToEnd = field(default_factory=EndToEnd)  # the quantized model against the float one
    rounds_inputs: bool = False  # kernels that round float values to 8 bits, as a share of the whole value
    start: str = ""  # of a file that differs in a plain session only: the first tensor that does

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quantization.parts = self.parts

    @property
    def codes(self) -> int:
        return sum(q.codes for q in self.quantizers.values())

    @property
    def output_error(self) -> float:
        return max((output.error for output in self.local_outputs.values()), default=0.0)

    @property
    def at_boundary(self) -> int:
        return sum(q.at_boundary for q in self.quantizers.values())

    @property
    def wrong(self) -> int:
        return sum(q.wrong for q in self.quantizers.values())

    def see_targets(self, targets: Sequence[Shape]) -> None:
        super().see_targets(targets)
        self.quantization.targets = targets

    def allowed(self, name: str) -> tuple[float, int]:
        """How far an output may be from the model's, in dB, and how many of its labels may differ."""
        floor = self.floor_of(name)
        quantization = self.quantization.of(name)
        quiet = QUIET + (0.0 if self.rounds_inputs else self.runtime.of(name).moving_db)
        limits = (floor.noise_db + ABOVE_FLOOR, quantization.noise_db - BELOW_QUANTIZATION, quiet)
        rounding = 20 * math.log10(self.rounding)
        noise = max(rounding, *(limit for limit in limits if limit < math.inf))
        chance = floor.labels_differ + 3 * math.sqrt(floor.labels_differ)
        labels = max(chance, quantization.labels_differ / 2) + max(MORE_LABELS * floor.labels, 1)
        return noise, math.ceil(labels)

    def output_failures(self) -> list[str]:
        """The outputs that a plain session computes otherwise than the model."""
        if self.output_count:
            return []  # which of them is which is not known
        found = []
        for name, output in {**self.runtime.outputs, **self.runtime.quiet}.items():
            noise, labels = self.allowed(name)
            if not output.holds_labels and not output.noise_db <= noise:
                found.append(
                    f"the output {name} is {output.noise_db:.1f} dB from the model's; {noise:.1f} is allowed"
                )
            elif output.labels_differ > labels:
                what = "values" if output.holds_labels else "labels"
                found.append(f"the output {name}: {output.labels_differ} {what} differ; {labels} are allowed")
        return found

    def remarks(self) -> list[str]:
        loud = {name: self.allowed(name)[0] for name in self.runtime.outputs}
        found: list[str] = []
        for name, noise in loud.items():
            if noise > LOUD and not self._holds_labels(name):
                moves = self.floor_of(name).noise_db
                found.append(
                    f"the output {name} moves by {moves:.0f} dB when the input moves by 1e-5, so the comparison of "
                    f"outputs says little ({noise:.0f} dB are allowed); the quantizers were compared one by one"
                )
        return found

    def failures(self) -> list[str]:
        outputs = self.output_failures()
        start = [self.start] if outputs and self.start else []
        return [*self.local_failures(), *start, *outputs]

    def local_failures(self) -> list[str]:
        """The failures of (a), in the order of the graph."""
        found = []
        most = self._most_at_boundary()
        for name in self.order:
            check = self.quantizers[name]
            if check.shapes:
                found.append(f"{name}: its input has the shape {check.shapes}")
            elif check.wrong:
                found.append(f"{name}: {check.wrong} of {check.codes} codes differ from the model's grid")
            if check.op_error > self.rounding:
                found.append(f"{name}: its input is off by {check.op_error:.2g} of the largest value")
            if name == most:
                found.append(
                    f"{name}: {check.at_boundary} of {check.codes} codes lie on another side of a boundary than the "
                    f"model's, {self.at_boundary} of {self.codes} in all quantizers"
                )
            if self.wrong_biases[name]:
                bias = f"{name.removesuffix('weight_quantizer')}bias"
                found.append(f"{bias}: {self.wrong_biases[name]} values differ from the model's bias")
        if self.output_count:
            found.append(f"the number of outputs is {self.output_count}")
        found += [f"the output {name} is {kind}" for name, kind in self.output_types.items()]
        outputs = [*self.local_outputs.items(), *self.local_parts.items()]
        found += [f"the output {name}{output}" for name, output in outputs if output.is_wrong]
        return found

    def _holds_labels(self, name: str) -> bool:
        """Do the labels hold? Many quantized scores are equal, and float rounding decides which of them is the
        largest."""
        return self.runtime.outputs.get(name, OutputNoise()).holds_labels

    def _most_at_boundary(self) -> str:
        """The quantizer with the largest share of codes on the other side of a boundary, if they are too many."""
        allowed = max(MOST_AT_BOUNDARY * self.codes, 2)
        if self.at_boundary <= allowed or self.rounding != FLOAT_ROUNDING:
            return ""
        return max(self.order, key=lambda name: self.quantizers[name].share_at_boundary)

    def as_dict(self) -> dict[str, Any]:
        local = {
            "quantizers": len(self.quantizers),
            "codes": self.codes,
            "wrong": self.wrong,
            "at_boundary": self.at_boundary,
            "output_error": self.output_error,
        }
        allowed = {name: self.allowed(name) for name in self.runtime.outputs}
        limits = {name: {"noise_db": noise, "labels": labels} for name, (noise, labels) in allowed.items()}
        return {
            "local": local,
            "allowed": limits,
            "quantization": self.quantization.as_dict(),
            **super().as_dict(),
        }

    def rows(self) -> Rows:
        rounding = f"{self.at_boundary} codes on a boundary, outputs within {self.output_error:.1e}"
        checked = f"{len(self.quantizers)} checked, {self.wrong} of {self.codes} codes wrong"
        return [("each quantizer", checked), ("float rounding", rounding)]
