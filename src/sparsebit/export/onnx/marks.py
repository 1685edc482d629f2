"""Marks: where a quantizer stands in the exported graph.

torch's exporter carries `sparsebit::FakeQuant(quantizer="<name>")` through to the ONNX graph, one node per call.
Everything else about the quantizer (grid, weight) stays here, by name; a backend puts the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebit.numeric import QParams, QuantSpec

DOMAIN = "sparsebit"
OP = "FakeQuant"
KEY = "quantizer"
CALL = "call"  # which of its calls: two on the same value stay two, and in order


@dataclass(frozen=True)
class Mark:
    """One quantizer: its grid and, where it rounds a constant, the values it rounds."""

    name: str  # layer1_0_conv1.weight_quantizer
    path: str  # layer1.0.conv1
    spec: QuantSpec
    qparams: QParams
    weight: Tensor | None = None  # the float values, after whatever the quantizer does before rounding
    stored_as: str = ""  # the scheme, where a backend stores the same values in another way

    @property
    def is_weight(self) -> bool:
        return self.weight is not None

    @property
    def scheme(self) -> str:
        """The scheme in the words of the config."""
        if self.spec.group is not None:
            per = "group"
        elif self.spec.per_channel:
            per = "channel"
        else:
            per = "tensor"
        return self.stored_as or f"per-{per}-{'symmetric' if self.spec.symmetric else 'affine'}"

    def unsigned(self) -> Mark:
        """The grid with codes from 0 on: every code and the zero point are shifted by half the range."""
        if not self.spec.symmetric or self.spec.narrow:
            return self
        spec = QuantSpec(self.spec.bits, False, self.spec.axis, group=self.spec.group)
        moved = QParams(self.qparams.scale, self.qparams.zero_point + 2 ** (self.spec.bits - 1))
        return replace(self, spec=spec, qparams=moved, stored_as=self.scheme)

    def describe(self) -> dict[str, str]:
        """The facts that the file has beside the nodes of this quantizer."""
        kind = "weight" if self.is_weight else "activation"
        return {
            "sparsebit.quantizer": self.name,
            "sparsebit.module": self.path,
            "sparsebit.bits": str(self.spec.bits),
            "sparsebit.scheme": self.scheme,
            "sparsebit.kind": kind,
        } | ({} if self.spec.group is None else {"sparsebit.group": str(self.spec.group)})


Marks = Mapping[str, Mark]


def emit(x: Tensor, name: str, call: int = 0) -> Tensor:
    """Called in place of rounding while the model is being exported."""
    out: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP}", (x,), {KEY: name, CALL: call}, dtype=x.dtype, shape=x.shape, version=1
    )
    return out
