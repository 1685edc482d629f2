"""Backend: the grids that a runtime can hold, the ops that it computes in integers, and the form of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from sparsebit.export.onnx.marks import Mark, Marks
from sparsebit.export.onnx.types import SINCE, container, container_bits, exporter_opset, opset_for, since
from sparsebit.numeric.spec import QuantSpec
from sparsebit.registry import Registry

if TYPE_CHECKING:
    import onnx_ir as ir

SIMULATED = "simulated in float"
FUSED_UP_TO = 21  # onnxruntime finds fewer integer kernels in newer opsets (its issue 28770)

BACKENDS: Registry[type[Backend]] = Registry("backend")


@dataclass(frozen=True)
class Problem:
    """Something the runtime cannot hold: which quantizer, why, and what to change."""

    name: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}\n  fix: {self.fix}"


# layers as the pre-flight report names them
WEIGHTED = ("*Conv[123]d*", "Conv1D", "ConvFunction", "*Linear*")


class Backend:
    """All that is known about one runtime. A subclass with a TYPE is enough: `BACKEND: <TYPE>` finds it.

    BITS, SCHEMES   by "W" and "A": the widths and schemes that it runs. A tensor that is not listed has no limit.
    INTEGER_OPS     ops with integer kernels, named as in the pre-flight report (`Conv2d`), as fnmatch patterns.
    """

    TYPE: ClassVar[str] = ""
    BITS: ClassVar[Mapping[str, Sequence[int]]] = {}
    SCHEMES: ClassVar[Mapping[str, Sequence[str]]] = {}
    INTEGER_OPS: ClassVar[tuple[str, ...]] = ()
    ADVICE: ClassVar[str] = ""  # for activations without a zero point, where they are slow

    def problems(self, mark: Mark) -> list[Problem]:
        """The properties of this quantizer that the runtime cannot hold."""
        return []

    def why_float(
        self,
        op: str,
        weight: QuantSpec | None,
        inputs: Sequence[QuantSpec],
        complete: bool = True,
        output: bool = True,
    ) -> str:
        """The reason why the runtime computes `op` in float; empty: it computes in integers.

        weight, inputs  the grids of everything it reads that is quantized.
        complete        all of its operands are quantized.
        output          everything that reads its output quantizes it, and on the same grid.
        """
        if not self.INTEGER_OPS:
            return SIMULATED
        specs = [*inputs, *([] if weight is None else [weight])]
        if not any(fnmatchcase(op, pattern) for pattern in self.INTEGER_OPS):
            return "no integer kernel"
        if not specs or not complete:
            return "an operand is float"
        widest = max(s.bits for s in specs)
        narrowest = min(s.bits for s in specs)
        if widest > 8:
            return f"{widest} bits"
        schemes = self.SCHEMES.get("A", ())
        if (
            schemes
            and all("symmetric" in scheme for scheme in schemes)
            and not all(s.symmetric for s in specs)
        ):
            return "zero points must be 0"
        if narrowest < 8:
            return f"{narrowest}-bit values are stored, then computed in float"
        return ""

    def opset(self, marks: Marks, asked: int) -> tuple[int, str]:
        """The opset to write, and why: the lowest that holds the types, never lower than asked."""
        opset, reason = exporter_opset(asked)
        needed = opset_for(marks)
        if opset >= needed:
            fewer = opset > FUSED_UP_TO and opset > needed
            return opset, reason + (
                "; onnxruntime has fewer integer kernels from opset 22 on" if fewer else ""
            )
        first = next(m for m in marks.values() if since(m) == needed)
        what = "scales per group"
        if SINCE[container_bits(first)] == needed:
            what = str(container(first))
        return needed, f"{asked} was asked; {needed} is the first with {what}"

    def lower(self, model: ir.Model, marks: Marks) -> Any:
        """Turn the marks of `model` into nodes of the runtime; returns a Lowered."""
        raise NotImplementedError

    def speed_up(self, model: ir.Model, marks: Marks) -> None:
        """Make the file faster in ways that hide quantizers. It is left out if each quantizer must be visible
        (extra_info)."""
