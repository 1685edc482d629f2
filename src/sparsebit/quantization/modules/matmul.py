"""Contractions of activations: every factor is quantized; what is only added, and a mask, stays float."""

from __future__ import annotations

from sparsebit.quantization.modules.base import MultipleInputsQuantOpr, Opr, define, spelled


class _AddMM(MultipleInputsQuantOpr):
    operands = ((1, "mat1"), (2, "mat2"))


class _AddBMM(MultipleInputsQuantOpr):
    operands = ((1, "batch1"), (2, "batch2"))


class _AddMV(MultipleInputsQuantOpr):
    operands = ((1, "mat"), (2, "vec"))


class _Attention(MultipleInputsQuantOpr):
    operands = ((0, "query"), (1, "key"), (2, "value"))


MatMul = define(
    "MatMul", MultipleInputsQuantOpr, *spelled("matmul mm bmm mv dot vdot inner vecdot tensordot")
)
Einsum = define("Einsum", MultipleInputsQuantOpr, *spelled("einsum chain_matmul multi_dot"))
AddMM = define("AddMM", _AddMM, *spelled("addmm"))
AddBMM = define("AddBMM", _AddBMM, *spelled("baddbmm addbmm"))
AddMV = define("AddMV", _AddMV, *spelled("addmv"))
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
