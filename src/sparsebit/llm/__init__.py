"""Large language models: weights in 2, 3, 4 or 8 bits, decoder block after decoder block, in checkpoints others load.

llm.quantize(model, batches, bits=4, save="out/"); model = llm.load("out/")
"""

from sparsebit.llm.checkpoints.load import load
from sparsebit.llm.checks.perplexity import perplexity
from sparsebit.llm.gguf import GgufReport, export_gguf
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.llm.models.blocks import Layout, find_blocks
from sparsebit.llm.quantize import quantize
from sparsebit.llm.report import Report

__all__ = [
    "GgufReport",
    "Layout",
    "QuantLinear",
    "Report",
    "export_gguf",
    "find_blocks",
    "load",
    "perplexity",
    "quantize",
]
