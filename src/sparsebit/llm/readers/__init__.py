"""Programs that run what `llm.quantize` writes, one file each.

Before the work, a reader judges whether it could run a checkpoint (`judge`). After the work, an installed reader runs
the folder in a separate process (`logits`). A reader that is not installed answers from a table of its rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from sparsebit.numeric.spec import QuantSpec
from sparsebit.registry import Registry


@dataclass(frozen=True)
class Packed:
    """One layer as it will be in the files."""

    spec: QuantSpec
    outputs: int
    inputs: int
    expert: bool = False  # one of a stack, which a router chooses from


@dataclass(frozen=True)
class Plan:
    """A checkpoint before it is written."""

    format: str
    config: dict[str, Any]  # of config.json
    layers: dict[str, Packed]  # by their names in the model
    # by their names in the files: shape, dtype
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(repr=False)
    dtype: str = "float32"  # of the float part
    reordered: bool = False  # groups follow a g_idx

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or [""])[0])

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def kinds(self) -> list[QuantSpec]:
        """The different grids."""
        return list(dict.fromkeys(layer.spec for layer in self.layers.values()))

    def with_settings(self, settings: Mapping[str, Any]) -> Plan:
        """A copy of the plan with more entries in quantization_config."""
        about = {**self.config["quantization_config"], **settings}
        config = {**self.config, "quantization_config": about}
        return Plan(self.format, config, self.layers, self.tensors, self.dtype, self.reordered)


@dataclass(frozen=True)
class Verdict:
    """The answer of a reader to a plan. `reason` explains a refusal; `settings` are entries for quantization_config."""

    reason: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    unknown: str = ""  # why it cannot tell

    @property
    def runs(self) -> bool:
        return not self.reason and not self.unknown


@dataclass(frozen=True)
class Row:
    """One line of the certificate."""

    reader: str
    state: str  # "runs", "fits" (its rules), "refused", "failed", "untried" (on no inputs), "unknown"
    text: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.reader}{f' {self.version}' if self.version else ''}: {self.text}"

    def facts(self) -> dict[str, str]:
        return {"reader": self.reader, "version": self.version, "state": self.state, "text": self.text}


class Reader:
    """One program. `formats` are those that it reads at all."""

    TYPE: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]

    def version(self) -> str:
        """The version of the installed program; empty if it is missing."""
        return ""

    def judge(self, plan: Plan) -> Verdict:
        """Could it run this? Asked before the long work."""
        raise NotImplementedError

    def missing(self, plan: Plan) -> str:
        """The packages that it needs and that are not installed. If the list is empty, `logits` runs."""
        return "not installed"

    def logits(self, folder: Path, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits of the checkpoint in float32, from a process without Sparsebit. An ExportError has the reason of a
        failure."""
        raise NotImplementedError


READERS: Registry[type[Reader]] = Registry("llm reader")
READERS.discover(__name__)
