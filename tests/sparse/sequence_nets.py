"""More small networks for pruning: attention as torch and people write it, recurrent layers, functions with weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TorchAttention(nn.Module):
    """nn.MultiheadAttention between a pre-norm and a residual."""

    def __init__(self, batch_first: bool, weights: bool = False, kdim: int | None = None):
        super().__init__()
        self.embed, self.norm, self.weights = nn.Embedding(20, 16), nn.LayerNorm(16), weights
        self.memory = nn.Embedding(20, kdim or 16)
        self.attn = nn.MultiheadAttention(16, 4, batch_first=batch_first, kdim=kdim, vdim=kdim)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x, m = self.embed(ids), self.memory(ids)
        h = self.norm(x)
        if not self.attn.batch_first:
            h, m = h.transpose(0, 1), m.transpose(0, 1)
        y = self.attn(h, m, m)[0] if self.weights else self.attn(h, m, m, need_weights=False)[0]
        return self.head(x + (y if self.attn.batch_first else y.transpose(0, 1)))


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask."""

    def __init__(self, batch_first: bool, norm_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            16, 4, 24, activation="gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.embed, self.batch_first = nn.Embedding(20, 16), batch_first
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=ids == 3)
        return self.head(x.mean(1 if self.batch_first else 0))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, batch_first=True), 1)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        n = x.shape[1]
        causal = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
        return self.head(self.decoder(x, self.encoder(x), tgt_mask=causal))


class Bert(nn.Module):
    """Separate projections, a mask that is added, a pooler on the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position, self.norm = nn.Embedding(20, 24), nn.Embedding(16, 24), nn.LayerNorm(24)
        self.query, self.key, self.value = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.out, self.norm1 = nn.Linear(24, 24), nn.LayerNorm(24)
        self.up, self.down, self.norm2 = nn.Linear(24, 48), nn.Linear(48, 24), nn.LayerNorm(24)
        self.pooler, self.head = nn.Linear(24, 24), nn.Linear(24, 5)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], 4, 6).permute(0, 2, 1, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.word(input_ids) + self.position(torch.arange(input_ids.shape[1])))
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -1e4
        p = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 6**0.5 + mask, dim=-1)
        y = torch.matmul(p, v).permute(0, 2, 1, 3).contiguous()
        x = self.norm1(x + self.out(y.view(y.shape[0], y.shape[1], 24)))
        x = self.norm2(x + self.down(F.gelu(self.up(x))))
        return {"tokens": x @ self.word.weight.t(), "pooled": self.head(torch.tanh(self.pooler(x[:, 0])))}


class FusedQKV(nn.Module):
    """torchvision's window attention: F.linear on fused weights, a bias for every head taken from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv, self.proj = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(31, 4))
        self.register_buffer("index", torch.arange(16)[:, None] - torch.arange(16) + 15)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        B, N, C = x.shape
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias).reshape(B, N, 3, 4, C // 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * (C // 4) ** -0.5, qkv[1], qkv[2]
        bias = self.table[self.index.view(-1)].view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        y = F.softmax(q.matmul(k.transpose(-2, -1)) + bias, dim=-1).matmul(v)
        return self.head((x + F.linear(y.transpose(1, 2).reshape(B, N, C), self.proj.weight)).mean(1))


class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 24), nn.Linear(24, 5)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(-1, (4, 6)) for f in (self.q, self.k, self.v))
        p = (torch.einsum("bnhd,bmhd->bhnm", q, k) * 6**-0.5).softmax(-1)
        return self.head(x + self.o(torch.einsum("bhnm,bmhd->bnhd", p, v).flatten(-2)))


class OneHead(nn.Module):
    """Attention without heads: dimensions of query and key go together, those of the value with what reads it."""

    def __init__(self, fused: bool):
        super().__init__()
        self.embed, self.head, self.fused = nn.Embedding(20, 12), nn.Linear(16, 5), fused
        self.q, self.k, self.v = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            return self.head(F.scaled_dot_product_attention(q, k, v))
        return self.head(torch.bmm(torch.bmm(q, k.transpose(1, 2)).div(8**0.5).softmax(-1), v))


class Rotary(nn.Module):
    """LLaMA's: rotary positions, keys and values repeated for groups of heads, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.RMSNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (32, 16, 16))
        self.o, self.head = nn.Linear(32, 16, bias=False), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        angle = torch.arange(32.0)[:, None] * 10 ** -(torch.arange(4.0) / 4)
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos())
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin())

    def turn(self, x: Tensor) -> Tensor:
        n = torch.arange(x.shape[2])
        a, b = x[..., :4], x[..., 4:]
        return x * self.cos[n] + torch.cat((-b, a), dim=-1) * self.sin[n]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        q, k, v = (f(h).view(h.shape[0], h.shape[1], -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.turn(q), self.turn(k)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.o(y.transpose(1, 2).flatten(2)))


class Recurrent(nn.Module):
    """A classifier on the last output, or on the last hidden states of both directions."""

    def __init__(self, kind: Any, **options: Any):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 8), kind(8, 12, **options)
        self.both = self.rnn.bidirectional
        self.fc = nn.Linear((getattr(self.rnn, "proj_size", 0) or 12) * (2 if self.both else 1), 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if not self.rnn.batch_first:
            x = x.transpose(0, 1)
        out, last = self.rnn(x)
        if self.both:
            h = last[0] if isinstance(self.rnn, nn.LSTM) else last
            return self.fc(torch.cat([h[-2], h[-1]], dim=1))
        return self.fc(out[:, -1] if self.rnn.batch_first else out[-1])


class Seq2Seq(nn.Module):
    """The decoder starts from the encoder's state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(20, 8), nn.GRU(8, 12, batch_first=True)
        self.decoder, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        _, state = self.encoder(x)
        return self.head(self.decoder(x, state)[0])


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.convs = nn.ModuleList([nn.Conv1d(8, 6, k, padding=k // 2) for k in (1, 3, 5)])
        self.bag, self.head = nn.EmbeddingBag(20, 6), nn.Linear(24, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        pooled = [F.max_pool1d(F.relu(c(x)), c(x).size(2)).squeeze(2) for c in self.convs]
        return self.head(torch.cat([*pooled, self.bag(ids)], 1))


class Functional(nn.Module):
    """Weights that belong to the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(8, 3, 3, 3) / 5), nn.Parameter(torch.randn(8))
        self.w2, self.g2 = nn.Parameter(torch.randn(12, 8, 3, 3) / 8), nn.Parameter(torch.rand(12) + 0.5)
        self.b2 = nn.Parameter(torch.randn(12))
        self.register_buffer("mean", torch.randn(12) / 3)
        self.register_buffer("var", torch.rand(12) + 0.5)
        self.gain, self.w3 = nn.Parameter(torch.rand(12) + 0.5), nn.Parameter(torch.randn(5, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.w1, self.b1, padding=1))
        x = F.batch_norm(F.conv2d(x, self.w2), self.mean, self.var, self.g2, self.b2)
        x = F.layer_norm(x.relu().mean((2, 3)), (12,), self.gain)
        return F.linear(x, self.w3)


class Nested(nn.Module):
    """Dicts and lists in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = nn.Conv2d(3, 8, 3, padding=1), nn.Embedding(20, 8)
        self.mix, self.head = nn.Linear(16, 12), nn.Linear(12, 5)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        a, b = self.image(batch["image"]).relu().mean((2, 3)), self.words(batch["words"]).mean(1)
        x = torch.relu(self.mix(torch.cat([a, b], 1)))
        return {"logits": self.head(x), "parts": [self.head(x).softmax(-1), {"ids": batch["words"]}]}


class Glu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(20, 12), nn.Linear(12, 32), nn.Linear(16, 5)
        self.conv, self.glu = nn.Conv1d(12, 24, 3, padding=1), nn.GLU(1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.glu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(F.glu(self.up(x), dim=-1).sum(1))
