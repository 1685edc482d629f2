"""softmax_in_float: for onnxruntime a softmax has no quantizer in front, as long as its integer kernel is wrong.

The product in front of it is still an integer kernel: it gives float values (export/kernels/wrong_kernels.py).
"""

from __future__ import annotations

from torch import fx

from sparsebit.export.kernels.wrong_kernels import is_wrong
from sparsebit.graph.ops import called_module
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.common import Backend
from sparsebit.quantization.modules.activations import QSoftmax


@graph_pass("softmax_in_float", when=lambda cfg: cfg.schedule.enabled("softmax_in_float"), keeps_output=True)
def softmax_in_float(gm: fx.GraphModule, ctx: object) -> int:
    found = 0
    for node in gm.graph.nodes:
        module = called_module(node, gm)
        quantizer = None
        if isinstance(module, QSoftmax):
            quantizer = module.input_quantizer
        if quantizer is None or quantizer.absorbed or quantizer.backend is not Backend.ONNXRUNTIME:
            continue
        if is_wrong("QLinearSoftmax"):
            quantizer.set_fake_fused()
            found += 1
    return found
