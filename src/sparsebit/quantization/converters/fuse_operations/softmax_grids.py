"""softmax_grids: the grid of probabilities has a scale that is one over a whole number.

onnxruntime's integer softmax multiplies with 1 / scale cut off to a whole number: with 1/255 (in float a hair above
it) that is 254, and one code in 16 to 60 comes out one too low. The grid grows by less than one code in 255.
"""

from __future__ import annotations

from torch import fx

from sparsebit.graph.ops import module_of
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.modules.activations import QSoftmax
from sparsebit.quantization.modules.base import QuantOpr


@graph_pass("softmax_grids", when=lambda cfg: cfg.schedule.enabled("softmax_grids"), keeps_output=True)
def softmax_grids(gm: fx.GraphModule, ctx: object) -> int:
    found = 0
    for node in gm.graph.nodes:
        if node.op != "call_module" or not isinstance(module_of(node, gm), QSoftmax):
            continue
        for user in node.users:
            reader = module_of(user, gm) if user.op == "call_module" else None
            quantizer = reader.input_quantizer if isinstance(reader, QuantOpr) else None
            if quantizer is not None and not quantizer.absorbed:
                quantizer.whole_inverse = True
                found += 1
    return found
