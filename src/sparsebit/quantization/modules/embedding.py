"""Embeddings: the table is quantized; its input are indices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebit.quantization.modules.base import (
    MultipleInputsQuantOpr,
    Opr,
    QuantOpr,
    define,
    register_qmodule,
    spelled,
)


@register_qmodule(sources=[nn.Embedding])
class QEmbedding(QuantOpr, nn.Embedding):
    quantize_input = False

    def forward(self, input: Tensor) -> Tensor:
        weight = self.quantized_weight()
        return nn.functional.embedding(
            input,
            weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


@register_qmodule(sources=[nn.EmbeddingBag])
class QEmbeddingBag(QuantOpr, nn.EmbeddingBag):
    quantize_input = False

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        return nn.functional.embedding_bag(
            input,
            self.quantized_weight(),
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )


class _Table(MultipleInputsQuantOpr):
    """A table that is computed in the graph, or shared with something else: it is quantized like an activation."""

    operands = ((1, "weight"),)


class _TableFirst(MultipleInputsQuantOpr):
    operands = ((0, "weight"),)  # torch.embedding(weight, indices)


EmbeddingFunction = define("EmbeddingFunction", _Table, nn.functional.embedding, nn.functional.embedding_bag)
EmbeddingTable = define("EmbeddingTable", _TableFirst, torch.embedding, torch.embedding_bag)
OneHot = define("OneHot", Opr, *spelled("one_hot"))
