"""QuantLinear: a Linear layer on packed codes. Few rows (a token) are multiplied with the packed words by a native
kernel, on GPUs by a Triton kernel; for many rows the weight is dequantized, piece by piece. Without a C compiler:
torch's int4 kernel, or the whole weight is dequantized, used and dropped.

Layers before it and adapters on top of it (PEFT) can be trained: the gradient of its input is made from the packed
weight again, and no float copy waits for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.llm.layers import kernels
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.words import pack_words, unpack_words

KERNEL_GROUPS = (32, 64, 128, 256)  # of torch's int4 kernel


class QuantLinear(nn.Linear):
    """y = x W^T + b with W = (codes - zeros) * scales; `weight` is the float matrix, made when it is asked for."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor | None

    def __init__(
        self, q: QuantizedWeight, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        nn.Module.__init__(self)  # not Linear's, which makes a float weight
        self.out_features, self.in_features = q.shape
        self.bits = q.bits
        self.symmetric = q.symmetric
        self.group = q.group
        self.dtype = dtype
        self.register_buffer("packed", pack_words(q.codes, q.bits))
        self.register_buffer("scales", q.scales.contiguous())
        self.register_buffer("zeros", q.zeros.contiguous())
        self.register_buffer("g_idx", q.g_idx)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))
        self._kernel: tuple[Tensor, Tensor] | None = None
        self._native: kernels.Native | None = None

    def quantized(self) -> QuantizedWeight:
        codes = unpack_words(self.packed, self.bits, self.in_features)
        return QuantizedWeight(
            codes, self.scales, self.zeros, self.bits, self.symmetric, self.group, self.g_idx
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.dequantize(self.dtype).as_subclass(_Copy)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        gpu = kernels.for_gpu(self.packed)
        if gpu is not None:
            matrix: Tensor = gpu.dequantize(self, dtype)
            return matrix
        native = self._find_native()
        if native is None:
            return self.quantized().dequantize(dtype)
        return native.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            out: Tensor = _Product.apply(x, self)
            return out
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """The forward without a gradient."""
        few = x.numel() <= kernels.ROWS * self.in_features
        native = self._find_native()
        # not through __getattr__: for one token every microsecond counts
        bias: Tensor | None = self._buffers["bias"]
        if native is not None:
            out = native.multiply(x) if few else native.product(x)
            out = out if bias is None else out.add_(bias)
            return out if out.dtype == x.dtype else out.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        if few and self._fits(x):
            out = self._int4(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
            return out if bias is None else out + bias
        gpu = kernels.for_gpu(x)
        if gpu is not None and x.numel() <= gpu.ROWS * self.in_features:
            out = gpu.multiply(self, x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
            return out if bias is None else out + bias
        return F.linear(x, self.dequantize(x.dtype), bias)

    def _find_native(self) -> kernels.Native | None:
        """The weight for the native kernels; made again when its tensors have moved."""
        if torch.compiler.is_compiling() or not kernels.wanted() or self.g_idx is not None:
            return None
        buffers = self._buffers
        tensors = buffers["packed"], buffers["scales"], buffers["zeros"]
        found = self._native
        if found is None or found.pointers != tuple(t.data_ptr() for t in tensors):  # type: ignore[union-attr]
            found = self._native = kernels.native(tensors, self.in_features, self.group, self.bits)  # type: ignore[arg-type]
        return found

    def _fits(self, x: Tensor) -> bool:
        """torch's int4 kernel: full groups of its sizes, few rows."""
        return (
            self.bits == 4
            and self.group in KERNEL_GROUPS
            and self.g_idx is None
            and self.in_features % self.group == 0
            and self.out_features % 16 == 0
            and x.device.type == "cpu"
            and x.numel() <= kernels.ROWS * self.in_features
        )

    def _int4(self, x: Tensor) -> Tensor:
        if self._kernel is None or self._kernel[1].dtype != x.dtype:
            # (code - 8) * scale + offset, with offset = (8 - zero) * scale
            codes = unpack_words(self.packed, 4, self.in_features).int()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            scales = self.scales.float().T
            offset = (8 - self.zeros.float().T) * scales
            self._kernel = packed, torch.stack([scales, offset], 2).to(x.dtype).contiguous()
        packed, grid = self._kernel
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, self.group, grid)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._kernel = None  # made from other codes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None, "_native": None}  # addresses: not for copies

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """`.to(dtype)` changes the type of the computation; the grid stays that of the solver."""
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.dtype = self.scales.dtype
            self.scales = scales.to(self.scales.device)
        self._kernel = self._native = None
        return self

    def extra_repr(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group={self.group or 'row'}, {kind}, bias={self.bias is not None}"
        )


class _Product(torch.autograd.Function):
    """The gradient of x alone; nothing is saved but the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantLinear) -> Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        grad = grads[0]
        native = layer._find_native()
        if native is None:
            return grad @ layer.dequantize(grad.dtype), None
        rows = native.gradient(grad.reshape(-1, layer.out_features))
        return rows.view(*grad.shape[:-1], layer.in_features), None


class _Copy(Tensor):
    """A dequantized weight: writing to it would be lost without a word, as PEFT's own merge would."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise SparsebitError(
            "the float weight of a packed layer is a copy and cannot be set; to merge adapters use "
            "sparsebit.llm.training.qlora.merge(model)"
        )
