"""Backend: constraints, checked before any work, and lowering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sparsebit.export.marks import Mark, Marks
from sparsebit.export.types import LOWEST_OPSET, opset_for
from sparsebit.registry import Registry

if TYPE_CHECKING:
    import onnx_ir as ir

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
        needed = opset_for(marks)
        if asked >= needed:
            return asked, "as asked"
        why = (
            "the lowest that torch's exporter writes"
            if needed == LOWEST_OPSET
            else "the first with its types"
        )
        return needed, f"{asked} was asked; {needed} is {why}"

    def lower(self, model: ir.Model, marks: Marks) -> Any:
        """Turn the marks of `model` into nodes of the runtime; returns a Lowered."""
        raise NotImplementedError
