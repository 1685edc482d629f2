"""Multi-head attention and transformer layers, made of QModules: every projection is a QLinear, and each input of the
two matmuls (query, key, softmax output, value) passes a QIdentity. torch's fused fast path is never taken,
because it would not call these children.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.quantization.modules.base import MultipleInputsQuantOpr, Opr, define, register_qmodule
from sparsebit.quantization.modules.linear import QLinear
from sparsebit.quantization.modules.own_forward import own_forward
from sparsebit.quantization.modules.unary import QIdentity


def quantized_child(module: nn.Module, config: Any = None) -> nn.Module:
    """The QModule for `module`, if it has parameters and there is one; else `module` itself, with its children
    replaced in place. Ops without parameters stay float: they are computed together with the layer before them.
    """
    from sparsebit.quantization.modules import qmodule_of  # not at import: the registry is being filled

    cls = qmodule_of(type(module)) or own_forward(type(module))
    if cls is not None and any(True for _ in module.parameters()):
        return cls(module, config)
    quantize_children(module, config)
    return module


def quantize_children(module: nn.Module, config: Any = None) -> None:
    """Replace the children of `module`; one that is there twice stays one."""
    new: dict[nn.Module, nn.Module] = {}
    for name, child in module._modules.items():
        if child is not None and child not in new:
            new[child] = quantized_child(child, config)
        module._modules[name] = None if child is None else new[child]


@register_qmodule(sources=[nn.MultiheadAttention])
class QMultiheadAttention(Opr, nn.MultiheadAttention):
    """The packed projection of torch is split in three. The returned weights are the ones that were used."""

    q_proj: QLinear
    k_proj: QLinear
    v_proj: QLinear

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        if org_module is None:
            return
        packed = self.in_proj_weight
        biases = self.in_proj_bias
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if packed is None else packed.chunk(3)
        for name, weight, bias in zip("qkv", weights, (None,) * 3 if biases is None else biases.chunk(3)):
            setattr(self, f"{name}_proj", QLinear(_linear(weight, bias), config))
        # None also keeps nn.TransformerEncoderLayer.forward off its fast path
        for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self._parameters[name] = None
        self.out_proj = quantized_child(self.out_proj, config)  # type: ignore[assignment]
        self.query, self.key, self.probs, self.value = (QIdentity() for _ in range(4))
        for name in ("q_proj", "k_proj", "v_proj", "query", "key", "probs", "value"):
            getattr(self, name).train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise SparsebitError(
                "MultiheadAttention: is_causal=True is a hint about attn_mask; pass attn_mask too"
            )
        batched = query.dim() == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q = self._heads(self.query(self.q_proj(query) * self.head_dim**-0.5))
        k = self._heads(self.key(self._extended(self.k_proj(key), self.bias_k)))
        v = self._heads(self.value(self._extended(self.v_proj(value), self.bias_v)))

        scores = q @ k.transpose(-2, -1)
        # without padding and weights torch believes the hint and does not look at attn_mask
        hint = is_causal and key_padding_mask is None and not need_weights
        mask: Tensor | None
        if hint:
            mask = _causal(scores)
        else:
            mask = self._mask(scores, attn_mask, key_padding_mask)
        scores = scores if mask is None else scores + mask
        if need_weights or mask is None:
            weights = scores.softmax(-1)
        else:
            weights = _safe_softmax(scores)
        weights = F.dropout(self.probs(weights), self.dropout, self.training)
        out = self.out_proj((weights @ v).transpose(1, 2).flatten(2))

        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1).contiguous()  # so that the user may view() it, as with torch
        if not need_weights:
            return out, None
        if average_attn_weights:
            weights = weights.mean(1)
        return out, weights if batched else weights.squeeze(0)

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, head, token, feature)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _extended(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Keys or values with the rows that add_bias_kv and add_zero_attn append."""
        rows = [x]
        if bias is not None:
            rows.append(bias.to(x.dtype).expand(x.shape[0], 1, -1))
        if self.add_zero_attn:
            rows.append(torch.zeros_like(x[:, :1]))
        return torch.cat(rows, 1) if len(rows) > 1 else x

    def _mask(self, scores: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """The tensor to add to `scores` (batch, head, query, key); all queries see appended keys."""
        total = None
        appended = int(self.bias_k is not None) + int(self.add_zero_attn)
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", padding)):
            if mask is None:
                continue
            mask = F.pad(_additive(name, mask, scores.dtype), (0, appended))
            if name == "key_padding_mask":
                mask = mask[:, None, None]
            elif mask.dim() == 3:
                mask = mask.unflatten(0, scores.shape[:2])
            total = mask if total is None else total + mask
        return total


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear over copies of a piece of a packed weight and bias."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return linear


def _additive(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise SparsebitError(
            f"MultiheadAttention: {name} is {mask.dtype}; make it bool (True: ignore) or float"
        )
    return mask.to(dtype)


def _causal(scores: Tensor) -> Tensor:
    return torch.full_like(scores[0, 0], float("-inf")).triu(1)


def _safe_softmax(scores: Tensor) -> Tensor:
    """Softmax, but 0 instead of NaN where everything is masked: what torch computes when no weights are asked for."""
    masked = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)


class _AttentionFunction(MultipleInputsQuantOpr):
    """The function takes its weights as arguments: these and its inputs are quantized, the two matmuls are not."""

    operands = (
        *((0, "query"), (1, "key"), (2, "value"), (5, "in_proj_weight"), (11, "out_proj_weight")),
        *((18, "q_proj_weight"), (19, "k_proj_weight"), (20, "v_proj_weight")),
    )


AttentionFunction = define("AttentionFunction", _AttentionFunction, F.multi_head_attention_forward)


class Composite(Opr):
    """A module of torch whose children are replaced. A subclass may override a block that forward calls, so its
    methods stay reachable."""

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        quantize_children(self, config)
        if org_module is not None and not isinstance(self, type(org_module)):
            self.__class__ = type(type(self).__name__, (type(self), type(org_module)), {})


class _Layer(Composite):
    """An encoder or decoder layer: blocks, each with a residual addition and a norm before or after. A norm reads
    every sum in float, so the additions are float (see math.QAdd)."""

    norm_first: bool

    def _residual(self, i: int, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        norm = getattr(self, f"norm{i}")
        out: Tensor = x + block(norm(x)) if self.norm_first else norm(x + block(x))
        return out


@register_qmodule(sources=[nn.TransformerEncoderLayer])
class QTransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)

        return self._residual(2, self._residual(1, src, attend), self._ff_block)


@register_qmodule(sources=[nn.TransformerDecoderLayer])
class QTransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal)

        def remember(x: Tensor) -> Tensor:
            return self._mha_block(x, memory, memory_mask, memory_key_padding_mask, memory_is_causal)

        x = self._residual(2, self._residual(1, tgt, attend), remember)
        return self._residual(3, x, self._ff_block)


@register_qmodule(sources=[nn.TransformerEncoder])
class QTransformerEncoder(Composite, nn.TransformerEncoder):
    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        self.use_nested_tensor = False  # only torch's fast path computes with nested tensors

    forward = nn.TransformerEncoder.forward


@register_qmodule(sources=[nn.TransformerDecoder])
class QTransformerDecoder(Composite, nn.TransformerDecoder):
    forward = nn.TransformerDecoder.forward


@register_qmodule(sources=[nn.Transformer])
class QTransformer(Composite, nn.Transformer):
    forward = nn.Transformer.forward
