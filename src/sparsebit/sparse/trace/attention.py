"""torch's attention blocks, rewritten so that they can be traced and lose heads.

nn.MultiheadAttention ties the number of heads to the width of its input. The blocks here have a Linear for
each of query, key, value and output, so both can be cut.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.trace.dropout import Rate


def closed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that have an open form, by path."""
    modules = model.named_modules(remove_duplicate=False)
    return {path: m for path, m in modules if type(m) in OPEN and _can_open(m)}


def open_blocks(model: fx.GraphModule) -> None:
    """Replace the blocks by their open forms, in place."""
    made: dict[int, nn.Module] = {}
    for path, module in reversed(closed_blocks(model).items()):  # inner ones first
        if id(module) not in made:
            made[id(module)] = OPEN[type(module)](module).train(module.training)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, made[id(module)])


def _can_open(module: nn.Module) -> bool:
    """Is there an open form? There is none for keys that are added to those of the input."""
    return not isinstance(module, nn.MultiheadAttention) or (
        module.bias_k is None and not module.add_zero_attn
    )


def attention_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, keys: Tensor) -> Tensor:
    """Both masks as one, which is added to the scores; `keys` has the axes (batch, heads, tokens, dim)."""
    total = keys.new_zeros(())
    if attn_mask is not None:
        mask = _added(attn_mask, keys)
        if mask.dim() == 3:
            total = mask.view(keys.shape[0], -1, mask.shape[-2], mask.shape[-1])
        else:
            total = mask
    if key_padding_mask is not None:
        total = total + _added(key_padding_mask, keys)[..., None, None, :]
    return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A boolean mask is true where the score is ignored."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


class OpenAttention(nn.Module):
    """nn.MultiheadAttention. If the weights are asked for, they are those before dropout."""

    def __init__(self, source: nn.MultiheadAttention):
        super().__init__()
        self.head_dim = int(source.head_dim)
        self.batch_first = source.batch_first
        self.rate = None
        if source.dropout:
            self.rate = Rate(source.dropout)
        if source._qkv_same_embed_dim:
            weights = _thirds(source.in_proj_weight)
        else:
            weights = [getattr(source, f"{part}_proj_weight") for part in "qkv"]
        if source.in_proj_bias is None:
            biases = [None] * 3
        else:
            biases = _thirds(source.in_proj_bias)
        self.q_proj, self.k_proj, self.v_proj = map(_linear, weights, biases)
        self.out_proj = _linear(source.out_proj.weight, source.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # describes attn_mask, and changes nothing
    ) -> tuple[Tensor, Tensor | None]:
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for layer, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        some = attn_mask is not None or key_padding_mask is not None
        mask = None
        if some:
            mask = attention_mask(attn_mask, key_padding_mask, k)
        rate = 0.0 if self.rate is None else self.rate()
        out = F.scaled_dot_product_attention(q, k, v, mask, rate).transpose(-3, -2).flatten(-2)
        out = self.out_proj(out)
        if not (self.batch_first):
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return out, weights.mean(-3) if average_attn_weights else weights


def _thirds(whole: nn.Parameter) -> list[Any]:
    """The three parts of a parameter, over the same memory."""
    return [nn.Parameter(part, whole.requires_grad) for part in whole.detach().chunk(3)]


def _linear(weight: Any, bias: Any) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = weight
    made.bias = bias
    return made


class _Layer(nn.Module):
    """The parts that encoder and decoder layers share, under the names of the source."""

    self_attn: Any
    multihead_attn: Any
    linear1: Any
    linear2: Any
    dropout: Any
    dropout1: Any
    dropout2: Any
    dropout3: Any
    norm1: Any
    norm2: Any
    norm3: Any

    def __init__(self, source: Any):
        super().__init__()
        for name, part in source.named_children():
            setattr(self, name, part)
        self.activation = source.activation
        self.norm_first = source.norm_first

    def _attend(self, name: str, x: Tensor, memory: Tensor, mask: Any, padding: Any) -> Tensor:
        attention, dropout = (
            (self.self_attn, self.dropout1) if name == "self" else (self.multihead_attn, self.dropout2)
        )
        found = attention(x, memory, memory, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        out: Tensor = dropout(found[0])
        return out

    def _feed(self, x: Tensor, last: Any) -> Tensor:
        out: Tensor = last(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return out


class OpenEncoderLayer(_Layer):
    def forward(
        self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        if self.norm_first:
            h = self.norm1(src)
            x = src + self._attend("self", h, h, src_mask, src_key_padding_mask)
            return x + self._feed(self.norm2(x), self.dropout2)
        x = self.norm1(src + self._attend("self", src, src, src_mask, src_key_padding_mask))
        out: Tensor = self.norm2(x + self._feed(x, self.dropout2))
        return out


class OpenDecoderLayer(_Layer):
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        seen = (memory, memory_mask, memory_key_padding_mask)
        if self.norm_first:
            h = self.norm1(tgt)
            x = tgt + self._attend("self", h, h, tgt_mask, tgt_key_padding_mask)
            x = x + self._attend("cross", self.norm2(x), *seen)
            return x + self._feed(self.norm3(x), self.dropout3)
        x = self.norm1(tgt + self._attend("self", tgt, tgt, tgt_mask, tgt_key_padding_mask))
        x = self.norm2(x + self._attend("cross", x, *seen))
        out: Tensor = self.norm3(x + self._feed(x, self.dropout3))
        return out


class OpenStack(nn.Module):
    """nn.TransformerEncoder and nn.TransformerDecoder: layer after layer, and a norm."""

    def __init__(self, source: Any):
        super().__init__()
        self.layers = source.layers
        self.norm = source.norm
        if isinstance(source, nn.TransformerEncoder):
            self.arguments: tuple[str, ...] = ("mask", "src_key_padding_mask", "is_causal")
        else:
            self.arguments = (
                "memory",
                "tgt_mask",
                "memory_mask",
                "tgt_key_padding_mask",
                "memory_key_padding_mask",
                "tgt_is_causal",
                "memory_is_causal",
            )

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        named = {**dict(zip(self.arguments, args)), **kwargs}
        x = named.pop("src", named.pop("tgt", x))
        if "mask" in named:
            named["src_mask"] = named.pop("mask")
        named = {k: v for k, v in named.items() if "is_causal" not in k}
        for layer in self.layers:
            x = layer(x, **named)
        out: Tensor = x if self.norm is None else self.norm(x)
        return out


class OpenTransformer(nn.Module):
    """nn.Transformer with its encoder and decoder, which may be a user's modules."""

    def __init__(self, source: nn.Transformer):
        super().__init__()
        self.encoder = source.encoder
        self.decoder = source.decoder

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        padding = {"src_key_padding_mask": src_key_padding_mask, "is_causal": src_is_causal}
        out: Tensor = self.decoder(
            tgt,
            self.encoder(src, mask=src_mask, **padding),
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )
        return out


OPEN: dict[type[nn.Module], Any] = {
    nn.MultiheadAttention: OpenAttention,
    nn.TransformerEncoderLayer: OpenEncoderLayer,
    nn.TransformerDecoderLayer: OpenDecoderLayer,
    nn.TransformerEncoder: OpenStack,
    nn.TransformerDecoder: OpenStack,
    nn.Transformer: OpenTransformer,
}
