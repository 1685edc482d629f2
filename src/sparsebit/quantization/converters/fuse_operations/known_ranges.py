"""known_ranges: the output of a hardsigmoid has the grid of 1/256, whatever calibration sees (onnxruntime).

clip(x / 6 + 1/2, 0, 1) is linear. On that grid the half is 128 steps, a whole number. So codes become codes by a change
of scale and zero point (export/onnx/integer_forms.py). That takes half the time of the float op between its borders.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsebit.graph.ops import called_module
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.common import Backend
from sparsebit.quantization.converters.output_grids import OutputGrids
from sparsebit.quantization.layers import is_active
from sparsebit.quantization.modules.activations import QHardSigmoid
from sparsebit.quantization.quantizers import Quantizer

RANGE = (0.0, 255 / 256)


@graph_pass("known_ranges", when=lambda cfg: cfg.schedule.enabled("known_ranges"), keeps_output=True)
def known_ranges(gm: fx.GraphModule, ctx: Any) -> int:
    changed = 0
    for node in gm.graph.nodes:
        module = called_module(node, gm)
        if not isinstance(module, QHardSigmoid) or not is_active(module.input_quantizer):
            continue
        readers = OutputGrids(gm, all_readers=True).readers(node) or []
        if readers and all(_is_plain(r.quantizer) and r.calls == 1 and not r.picked for r in readers):
            for reader in readers:
                reader.quantizer.known_range = RANGE
            changed += 1
    return changed


def _is_plain(quantizer: Quantizer) -> bool:
    spec = quantizer.spec
    whole = spec.bits == 8 and not spec.symmetric and spec.axis is None and quantizer.TYPE == "uniform"
    return whole and quantizer.backend is Backend.ONNXRUNTIME
