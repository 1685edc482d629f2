"""Backend: constraints, checked before any work, and lowering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sparsebit.export.marks import Mark, Marks
from sparsebit.export.types import SINCE, container, container_bits, exporter_opset, opset_for, since
from sparsebit.registry import Registry

if TYPE_CHECKING:
    import onnx_ir as ir

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


class Backend:
    """A subclass says what it refuses (`problems`) and how marks become nodes (`lower`)."""

    TYPE: ClassVar[str] = ""

    def problems(self, mark: Mark) -> list[Problem]:
        """What of this quantizer the runtime cannot hold."""
        return []

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
        what = str(container(first)) if SINCE[container_bits(first)] == needed else "scales per group"
        return needed, f"{asked} was asked; {needed} is the first with {what}"

    def lower(self, model: ir.Model, marks: Marks) -> Any:
        """Turn the marks of `model` into nodes of the runtime; returns a Lowered."""
        raise NotImplementedError

    def speed_up(self, model: ir.Model, marks: Marks) -> None:
        """What makes the file faster, but hides quantizers; left out where each of them must be seen (extra_info)."""
