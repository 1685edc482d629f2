"""Tiny local networks that tests share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Batch norms with statistics that matter, so that a wrong folding shows."""
    g = torch.Generator().manual_seed(seed)
    for m in model.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            m.running_mean.copy_(torch.randn(m.running_mean.shape, generator=g) * 0.3)
            m.running_var.copy_(torch.rand(m.running_var.shape, generator=g) + 0.5)
            with torch.no_grad():
                m.weight.copy_(torch.rand(m.weight.shape, generator=g) + 0.5)
                m.bias.copy_(torch.randn(m.bias.shape, generator=g) * 0.2)
    return model.eval()


class Block(nn.Module):
    """conv - bn - relu - depthwise conv - bn, and a shortcut."""

    def __init__(self, channels: int, bias: bool = False):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=bias)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + x)


class SmallNet(nn.Module):
    """Stem, two residual blocks, pool, linear: the parts of a vision model."""

    def __init__(self, classes: int = 10, channels: int = 8, bias: bool = False, blocks: int = 2):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(channels)
        self.layer1 = nn.Sequential(*[Block(channels, bias) for _ in range(blocks)])
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(channels * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.pool(self.layer1(x)), 1))


def small_net(**kwargs: object) -> SmallNet:
    torch.manual_seed(0)
    net = randomise(SmallNet(**kwargs))  # type: ignore[arg-type]
    assert isinstance(net, SmallNet)
    return net


class Attention(nn.Module):
    """Self-attention the way transformers write it: matmul, softmax, reshape."""

    def __init__(self, dim: int = 16, heads: int = 2):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .reshape(b, n, 3, self.heads, c // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attn = (torch.matmul(q, k.transpose(-2, -1)) / (c // self.heads) ** 0.5).softmax(dim=-1)
        return x + self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


def images(n: int = 4, batch: int = 4, size: int = 12, seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 3, size, size, generator=g) for _ in range(n)]


def sqnr(reference: Tensor, x: Tensor) -> float:
    """Signal to quantization noise, in dB."""
    return (10 * torch.log10(reference.pow(2).sum() / (reference - x).pow(2).sum())).item()


class Checks(nn.Module):
    """Asserts and raises on shapes. (Not in a test file: pytest rewrites the asserts there.)"""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == 4, f"got {x.shape}"
        if x.size(1) != 4:
            raise ValueError(f"expected 4 features, got {x.size(1)}")
        if x.shape[0] > 100 or x.shape[1] > 100:
            raise ValueError("too large")
        return self.fc(x)
