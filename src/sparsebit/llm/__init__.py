"""Large language models: weights in 2, 3, 4 or 8 bits, decoder block after decoder block, in checkpoints others load.

llm.quantize(model, batches, bits=4, save="out/"); model = llm.load("out/")
"""

from sparsebit.llm.blocks import Layout, find_blocks
from sparsebit.llm.checkpoint import load
from sparsebit.llm.gguf import GgufReport, export_gguf
from sparsebit.llm.linear import QuantLinear
from sparsebit.llm.measure import perplexity
from sparsebit.llm.report import Report
from sparsebit.llm.run import quantize

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
