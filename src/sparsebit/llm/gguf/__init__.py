"""GGUF, the file that llama.cpp and its kin read: weights, hyperparameters and the tokenizer in one file."""

from sparsebit.llm.gguf.export import ARCHITECTURES, GgufReport, export_gguf, to_gguf
from sparsebit.llm.gguf.packing import pack

__all__ = ["ARCHITECTURES", "GgufReport", "export_gguf", "pack", "to_gguf"]
