"""Embedding: the table is quantized; its input are indices."""

from __future__ import annotations

from torch import Tensor, nn

from sparsebit.quantization.modules.base import QuantOpr, register_qmodule


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
