"""Contractions of activations: every factor is quantized; a mask, and a value that is only added, stay float."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.graph.export.experts import Experts, grouped_mm
from sparsebit.quantization.modules.base import (
    MultipleInputsQuantOpr,
    Opr,
    QuantOpr,
    define,
    register_qmodule,
    spelled,
)
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Mode


class _AddMM(MultipleInputsQuantOpr):
    operands = ((1, "mat1"), (2, "mat2"))


class _AddBMM(MultipleInputsQuantOpr):
    operands = ((1, "batch1"), (2, "batch2"))


class _AddMV(MultipleInputsQuantOpr):
    operands = ((1, "mat"), (2, "vec"))


class _GroupedMM(MultipleInputsQuantOpr):
    operands = ((0, "mat_a"), (1, "mat_b"))


class _Attention(MultipleInputsQuantOpr):
    """softmax(q k' / sqrt(d) + mask) v. Quantized it is computed step by step: the probabilities are rounded too."""

    operands = ((0, "query"), (1, "key"), (2, "value"))

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        self.probs = QIdentity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        quantizer = self.probs.input_quantizer
        if quantizer is None or quantizer.absorbed:
            return self.op(*args, **kwargs)
        # a hook wants to see the probabilities
        if quantizer.mode is Mode.FLOAT and not quantizer._forward_hooks:
            return self.op(*args, **kwargs)
        return self.by_steps(*args, **kwargs)

    def by_steps(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(repeats, -3)
            value = value.repeat_interleave(repeats, -3)
        scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        probs = scores.softmax(-1)
        if attn_mask is not None:
            probs = probs.nan_to_num(0.0)  # a row that is completely masked attends to nothing, as in torch
        return F.dropout(self.probs(probs), dropout_p) @ value


@register_qmodule(sources=[Experts])
class QExperts(QuantOpr):
    """Experts: the weight is (experts * out, in), so that each row has its scale."""

    input_axis = -1

    def adopt(self, module: nn.Module) -> None:
        assert isinstance(module, Experts)
        weight = module.weight
        self.experts = weight.shape[0]
        rows = weight.detach().transpose(1, 2).flatten(0, 1).contiguous()
        self.weight = nn.Parameter(rows, weight.requires_grad)

    def forward(self, input: Tensor, offs: Tensor) -> Tensor:
        weight = self.quantized_weight().unflatten(0, (self.experts, -1)).transpose(1, 2)
        return grouped_mm(self.quantized_input(input), weight, offs)


MatMul = define("MatMul", MultipleInputsQuantOpr, *spelled("matmul mm bmm mv dot vdot inner tensordot"))
VecDot = define(
    "VecDot", MultipleInputsQuantOpr, *spelled("vecdot"), doc="In a file it is a product and a sum."
)
Einsum = define("Einsum", MultipleInputsQuantOpr, *spelled("einsum chain_matmul multi_dot"))
AddMM = define("AddMM", _AddMM, *spelled("addmm"))
AddBMM = define("AddBMM", _AddBMM, *spelled("baddbmm addbmm"))
AddMV = define("AddMV", _AddMV, *spelled("addmv"))
GroupedMatMul = define("GroupedMatMul", _GroupedMM, grouped_mm, *spelled("grouped_mm _grouped_mm"))
Attention = define("Attention", _Attention, *spelled("scaled_dot_product_attention"))

LinAlg = define(
    "LinAlg",
    Opr,
    *spelled(
        "outer ger addr kron cross matrix_power matrix_exp inverse inv pinverse pinv det logdet slogdet"
    ),
    *spelled("svd svdvals qr eig eigh eigvals eigvalsh cholesky cholesky_inverse cholesky_solve solve lstsq"),
    *spelled(
        "solve_triangular triangular_solve lu lu_solve lu_unpack matrix_rank cond householder_product orgqr"
    ),
    doc="Decompositions and outer products: float.",
)
Fourier = define(
    "Fourier",
    Opr,
    *spelled(
        "fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft ihfft fftshift ifftshift"
    ),
    *spelled("stft istft view_as_real view_as_complex"),
    doc="Transforms: float.",
)
