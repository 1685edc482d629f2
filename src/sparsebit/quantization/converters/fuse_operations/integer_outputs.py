"""integer_outputs: a float op that reads an integer convolution gets a quantizer at its input (onnxruntime).

A convolution is integer there only if every reader of its output takes codes. So a batch norm that is not folded, a
tanh or a bilinear resize reads codes too, which costs one rounding. Norms of tokens and outputs of the model still read
float values: there the rounding costs more than the convolution gains. A convolution of 1 x 1 gives float values
anyway.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import called_module
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import (
    INTEGER_CONVS,
    wants_integer_output,
)
from sparsebit.quantization.converters.fuse_operations.one_grid import insert_quantizer
from sparsebit.quantization.converters.output_grids import OutputGrids
from sparsebit.quantization.modules import MultipleInputsQuantOpr, QuantOpr
from sparsebit.quantization.modules.activations import QSoftmax
from sparsebit.quantization.modules.conv import is_pointwise
from sparsebit.quantization.modules.math import FLOAT_READERS

# Rounding and unpacking a value take as long as this many multiplications save (AVX2; fewer with VNNI).
PRODUCTS_PER_VALUE = 48


@graph_pass("integer_outputs", when=lambda cfg: cfg.schedule.enabled("integer_outputs"), keeps_output=True)
def integer_outputs(gm: fx.GraphModule, ctx: Any) -> int:
    inserted = 0
    for node in list(gm.graph.nodes):
        conv: Any = called_module(node, gm)
        if not isinstance(conv, INTEGER_CONVS) or conv.input_quantizer is None or is_pointwise(conv):
            continue
        if not wants_integer_output(conv, conv.input_quantizer) or not _is_worth_it(conv):
            continue
        edges = OutputGrids(gm).float_edges(node)
        if any(_must_be_float(reader, gm, ctx.config) for _, reader in edges):
            continue
        for value, reader in edges:
            insert_quantizer(gm, reader, value, f"{reader.name}_identity", conv.input_quantizer)
            inserted += 1
    return inserted


def _is_worth_it(conv: Any) -> bool:
    return conv.weight[0].numel() >= PRODUCTS_PER_VALUE


def _must_be_float(reader: fx.Node, gm: fx.GraphModule, config: Any) -> bool:
    module = called_module(reader, gm)
    return (
        reader.op == "output"
        or isinstance(module, (QSoftmax, *FLOAT_READERS))
        or _is_switched_off(module, config)
    )


def _is_switched_off(module: Any, config: Any) -> bool:
    """Does the config want the inputs of this op in float? A batch norm may be folded later, after training."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not config.schedule.fuse_bn:
        return True
    if isinstance(module, MultipleInputsQuantOpr):
        return not module.wants_input_quant(config)
    quantizer = None
    if isinstance(module, QuantOpr):
        quantizer = module.input_quantizer
    return quantizer is not None and bool(quantizer.cfg.quantizer.disable)
