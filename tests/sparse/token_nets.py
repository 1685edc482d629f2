"""Small networks on tokens as people write them, for pruning: vision transformers, mixers, a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """timm's: one projection for query, key and value."""

    def __init__(self, dim: int, heads: int, fused: bool = True):
        super().__init__()
        self.heads, self.head_dim, self.fused = heads, dim // heads, fused
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0) if self.fused else (qkv[0], qkv[1], qkv[2])
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = ((q * self.head_dim**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, fused: bool = True):
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(dim), nn.LayerNorm(dim), Attention(dim, heads, fused)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class ViT(nn.Module):
    def __init__(self, fused: bool = True):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 24, 4, 4), nn.Parameter(torch.randn(1, 1, 24))
        self.pos = nn.Parameter(torch.randn(1, 17, 24))
        self.blocks, self.norm = nn.Sequential(Block(24, 4, fused), Block(24, 4, fused)), nn.LayerNorm(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


class Windows(nn.Module):
    """Swin: attention in windows, on channels-last tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.attn = nn.Conv2d(3, 16, 2, 2), nn.LayerNorm(16), Attention(16, 2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        B, H, W, C = x.shape
        y = torch.roll(self.norm(x), (-1, -1), (1, 2)).view(B, H // 4, 4, W // 4, 4, C)
        y = self.attn(y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, C))
        y = y.view(B, H // 4, W // 4, 4, 4, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        return self.head((x + torch.roll(y, (1, 1), (1, 2))).mean((1, 2)))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dw, self.norm = (
            nn.Conv2d(3, 12, 2, 2),
            nn.Conv2d(12, 12, 7, padding=3, groups=12),
            nn.LayerNorm(12),
        )
        self.up, self.down, self.gamma = (
            nn.Linear(12, 24),
            nn.Linear(24, 12),
            nn.Parameter(torch.rand(12) + 0.5),
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.down(F.gelu(self.up(self.norm(self.dw(x).permute(0, 2, 3, 1))))) * self.gamma
        return self.head((x + y.permute(0, 3, 1, 2)).mean([-2, -1]))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.n1, self.n2 = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16), nn.LayerNorm(16)
        self.tokens = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(self.n2(x))).mean(1))


class Llama(nn.Module):
    """Grouped-query attention, rotary-free, gated feed-forward, RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.n1, self.n2 = nn.Embedding(20, 24), nn.RMSNorm(24), nn.RMSNorm(24)
        self.q, self.k, self.v = (
            nn.Linear(24, 24, bias=False),
            nn.Linear(24, 12, bias=False),
            nn.Linear(24, 12, bias=False),
        )
        self.o, self.gate, self.up = nn.Linear(24, 24, bias=False), nn.Linear(24, 32), nn.Linear(24, 32)
        self.down, self.head = nn.Linear(32, 24), nn.Linear(24, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        b, n, _ = x.shape
        h = self.n1(x)
        q = self.q(h).view(b, n, 4, 6).transpose(1, 2)
        k, v = (f(h).view(b, n, 2, 6).transpose(1, 2).repeat_interleave(2, dim=1) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).contiguous().view(b, n, -1))
        h = self.n2(x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))
