"""Norms and attention over channels that people write by hand, in networks to prune."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from conv_nets import conv
from torch import Tensor, nn


class RootMeanSquare(nn.Module):
    """As language models write it: in float, the weight behind the cast."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class OneMoreThanTheWeight(RootMeanSquare):
    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(input=x.float() ** 2, dim=-1, keepdim=True)
        return (x.float() / torch.sqrt(mean + 1e-6) * (1.0 + self.weight.float())).type_as(x)


class Length(RootMeanSquare):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) * 3.0 * self.weight


class MeanAndDeviation(nn.Module):
    """With the deviation that divides by n - 1, outside the root."""

    def __init__(self, dim: int):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3) + self.b


class OfPictures(MeanAndDeviation):
    """Channels first."""

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.a[:, None, None] * x + self.b[:, None, None]


class WithoutWeights(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=(-1,), keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-3)


class Tokens(nn.Module):
    """Attention and a feed-forward, each behind a norm, and one in front of the head."""

    def __init__(self, norm: type[nn.Module] | type[RootMeanSquare], dim: int = 24):
        super().__init__()
        made = [norm() if norm is WithoutWeights else norm(dim) for _ in range(3)]  # type: ignore[call-arg]
        self.embed, self.norms = nn.Embedding(20, dim), nn.ModuleList(made)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(dim, 32), nn.Linear(32, dim), nn.Linear(dim, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


class Pictures(nn.Module):
    """A norm over channels; then a map of positions from what is largest, and what is usual, in all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = conv(3, 12), OfPictures(12), conv(12, 8)
        self.gate, self.all = nn.Conv2d(2, 1, 3, padding=1), nn.GroupNorm(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.all(self.last(self.norm(self.stem(x))))
        usual = torch.mean(x, dim=1, keepdim=True)
        largest, _ = torch.max(x, dim=1, keepdim=True)
        return x * self.gate(torch.cat([usual, largest], dim=1)).sigmoid()
