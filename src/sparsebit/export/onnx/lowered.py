"""Lowered: where each quantizer went in a file, by name. It travels in the file, which can be checked again later."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from sparsebit.errors import ExportError
from sparsebit.export.onnx.graph_edit import array_of

BIAS_OF = "sparsebit.bias_of"  # written beside the bias of a layer: the name of its weight quantizer
LOWERED = "sparsebit.lowered"
Clip = tuple[float | None, float | None]  # lower and upper bound


@dataclass
class Site:
    """One place where a quantizer works in the file: the values before and after it."""

    name: str
    after: str
    before: str = ""  # a weight has none
    hoisted: bool = False  # the values before it are on the grid already: a copy of it stands further up
    # an activation that only clips, taken in: the values before it are not clipped yet
    clip: Clip = (None, None)
    transposed: bool = False  # a weight that is stored as (inputs, outputs)
    shift: float = 0.0  # what the zero point adds: the values before it lack this summand
    factor: float = 1.0  # the values after it are read on a grid with this times the scale


class Bias(NamedTuple):
    """A bias of the file: int32 codes on the grid of input times weight."""

    codes: np.ndarray[Any, Any]
    step: np.ndarray[Any, Any]

    @property
    def values(self) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = self.codes.astype(np.float32) * self.step
        return values


def _default(name: str) -> tuple[Any, ...]:
    return astuple(Site(name, f"{name}/DQ/out"))


@dataclass
class Lowered:
    """The result of lowering, by quantizer name."""

    sites: list[Site] = field(default_factory=list)
    bias: dict[str, Bias] = field(default_factory=dict)  # by weight quantizer

    def add_aliases(self, aliases: dict[str, str]) -> None:
        """A quantizer that was merged into another works where that one does."""
        where = {site.name: site for site in self.sites}
        for name in aliases:
            kept = aliases[name]
            while kept in aliases:
                kept = aliases[kept]
            self.sites.append(replace(where[kept], name=name))

    def by_name(self) -> dict[str, list[Site]]:
        found: dict[str, list[Site]] = {}
        for site in self.sites:
            found.setdefault(site.name, []).append(site)
        return found

    def to_json(self) -> str:
        short = [astuple(site) for site in self.sites]
        for i, site in enumerate(self.sites):
            while len(short[i]) > 1 and short[i][-1] == _default(site.name)[len(short[i]) - 1]:
                short[i] = short[i][:-1]  # the default is not stored
        return json.dumps(short, separators=(",", ":"))

    @classmethod
    def of_file(cls, model: ir.Model) -> Lowered:
        """Read the text of `to_json`; the biases are read from the graph itself."""
        try:
            known = json.loads(model.metadata_props[LOWERED])
        except ValueError as error:
            raise ExportError(f"the metadata {LOWERED} is damaged: {error}; export the model again") from None
        sites = []
        for entry in known:
            name, after, before, hoisted, clip, transposed, shift, factor = list(entry) + list(
                _default(entry[0])[len(entry) :]
            )
            sites.append(Site(name, after, before, hoisted, (clip[0], clip[1]), transposed, shift, factor))
        bias = {}
        for node in model.graph:
            if BIAS_OF in node.metadata_props:
                name, (codes, step) = node.metadata_props[BIAS_OF], map(array_of, node.inputs[:2])
                if codes is None or step is None:
                    raise ExportError(f"{name}: the bias beside it is not a constant; export the model again")
                bias[name] = Bias(codes, step)
        return cls(sites, bias)
