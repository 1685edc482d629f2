"""Marks: where a quantizer stands in the exported graph.

torch's exporter carries `sparsebit::FakeQuant(quantizer="<name>")` through to the ONNX graph, one node per call.
Everything else about the quantizer (grid, weight) stays here, by name; a backend puts the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.numeric import QParams, QuantSpec

DOMAIN, OP, KEY = "sparsebit", "FakeQuant", "quantizer"


@dataclass(frozen=True)
class Mark:
    """One quantizer: its grid and, where it rounds a constant, the values it rounds."""

    name: str  # layer1_0_conv1.weight_quantizer
    path: str  # layer1.0.conv1
    spec: QuantSpec
    qparams: QParams
    weight: Tensor | None = None  # the float values, after whatever the quantizer does before rounding

    @property
    def is_weight(self) -> bool:
        return self.weight is not None

    def describe(self) -> dict[str, str]:
        """What is written beside its nodes in the file."""
        scheme = f"per-{'channel' if self.spec.per_channel else 'tensor'}-"
        scheme += "symmetric" if self.spec.symmetric else "affine"
        kind = "weight" if self.is_weight else "activation"
        return {
            "sparsebit.quantizer": self.name,
            "sparsebit.module": self.path,
            "sparsebit.bits": str(self.spec.bits),
            "sparsebit.scheme": scheme,
            "sparsebit.kind": kind,
        }


Marks = Mapping[str, Mark]


def emit(x: Tensor, name: str) -> Tensor:
    """Called in place of rounding while the model is being exported."""
    out: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP}", (x,), {KEY: name}, dtype=x.dtype, shape=x.shape, version=1
    )
    return out
