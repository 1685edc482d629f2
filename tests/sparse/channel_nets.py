"""Small networks as people write them, for pruning: one class per way of handling channels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(i: int, o: int, k: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU()
    )


class Head(nn.Module):
    def __init__(self, body: nn.Module, channels: int):
        super().__init__()
        self.body, self.fc = body, nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).mean((2, 3)))


class Flat(nn.Module):
    """A classifier over flattened positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv(x)), 4)
        return self.fc2(torch.relu(self.fc1(x.view(x.size(0), -1))))


class Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int = 1):
        super().__init__()
        self.a, self.b = (
            conv(i, o, 3, stride),
            nn.Sequential(nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o)),
        )
        self.down = nn.Conv2d(i, o, 1, stride) if i != o or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        out = self.b(self.a(x))
        out += skip
        return torch.relu(out)


class Bottleneck(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.body = nn.Sequential(conv(c, c // 2, 1), conv(c // 2, c // 2), nn.Conv2d(c // 2, c, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.layers = nn.ModuleList([conv(8 + 4 * i, 4) for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, dim=1)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c = conv(3, 8), conv(8, 6, 1), conv(8, 8, 3), conv(8, 4, 5)
        self.pool = nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.a(x), self.b(x), self.c(self.pool(x))], 1)


class SqueezeExcite(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.stem, self.down, self.up = conv(3, c), nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        s = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.up(F.silu(self.down(s))))


class SpatialGate(nn.Module):
    """A map of one channel that weights every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = conv(3, 8), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x * self.gate(x).sigmoid()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.mid = conv(3, 8), conv(8, 12), conv(12, 16)
        self.up1, self.u1 = nn.ConvTranspose2d(16, 12, 2, 2), conv(24, 12)
        self.u2, self.head = conv(20, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        x = self.u1(torch.cat([self.up1(c), b], 1))
        x = self.u2(torch.cat([F.interpolate(x, scale_factor=2.0), a], 1))
        return self.head(x)


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16)
        self.branch = nn.Sequential(conv(8, 8, 1), conv(8, 8, 3, groups=8), conv(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, dim=1)
        x = torch.cat((a, self.branch(b)), dim=1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Ghost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.primary, self.cheap = conv(3, 8), conv(8, 8, 3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.primary(x)
        return torch.cat([x, self.cheap(x)], dim=1)[:, :12, :, :]


class FPN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = conv(3, 8, stride=2), conv(8, 12, stride=2)
        self.l1, self.l2, self.out = nn.Conv2d(8, 6, 1), nn.Conv2d(12, 6, 1), nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = self.c1(x)
        b = self.c2(a)
        top = self.l2(b)
        low = self.l1(a) + F.interpolate(top, size=a.shape[-2:])
        return {"top": self.out(top), "low": self.out(low)}


class C2f(nn.Module):
    """YOLO's block: split, a chain whose every stage is kept, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.cv1, self.m = conv(3, 16), nn.ModuleList([conv(8, 8), conv(8, 8)])
        self.cv2 = conv(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).split((8, 8), 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 16), conv(16, 16, 3, groups=4), nn.GroupNorm(4, 16), conv(16, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class PixelShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.up, self.b = conv(3, 8), nn.Conv2d(8, 24, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.pixel_shuffle(self.up(self.a(x)), 2))


class Padded(nn.Module):
    """The shortcut of CIFAR's ResNet: every other pixel, zero channels around."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = conv(3, 8), nn.Sequential(conv(8, 16, 3, 2), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.relu(self.body(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4)))


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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.fc = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 12, batch_first=True),
            nn.Linear(12, 5),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.lstm(self.embed(ids))[0][:, -1])


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.same, self.head = conv(3, 8), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(self.same(torch.relu(self.same(x)))))


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def words() -> Tensor:
    return torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(1))


Made = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
ARCHITECTURES: dict[str, Made] = {
    "plain": (lambda: Head(nn.Sequential(conv(3, 8), conv(8, 12), conv(12, 16)), 16), image),
    "flat": (Flat, image),
    "residual": (
        lambda: Head(nn.Sequential(conv(3, 8), Residual(8, 8), Residual(8, 12, 2), Residual(12, 12)), 12),
        image,
    ),
    "bottleneck": (lambda: Head(nn.Sequential(conv(3, 16), Bottleneck(16), Bottleneck(16)), 16), image),
    "dense": (lambda: Head(Dense(), 20), image),
    "inception": (lambda: Head(Inception(), 18), image),
    "depthwise": (
        lambda: Head(nn.Sequential(conv(3, 8), conv(8, 8, 3, groups=8), conv(8, 16, 1)), 16),
        image,
    ),
    "multiplier": (
        lambda: Head(nn.Sequential(conv(3, 4), conv(4, 8, 3, groups=4), conv(8, 16, 1)), 16),
        image,
    ),
    "squeeze-excite": (lambda: Head(SqueezeExcite(12), 12), image),
    "spatial gate": (lambda: Head(SpatialGate(), 8), image),
    "unet": (UNet, image),
    "shuffle": (lambda: Head(Shuffle(), 16), image),
    "ghost": (lambda: Head(Ghost(), 12), image),
    "fpn": (FPN, image),
    "c2f": (lambda: Head(C2f(), 8), image),
    "grouped": (lambda: Head(Grouped(), 8), image),
    "pixel shuffle": (PixelShuffleNet, image),
    "padded shortcut": (lambda: Head(Padded(), 16), image),
    "vit": (ViT, image),
    "vit by hand": (lambda: ViT(fused=False), image),
    "windows": (Windows, image),
    "convnext": (ConvNeXt, image),
    "mixer": (Mixer, image),
    "llama": (Llama, words),
    "lstm": (Recurrent, words),
    "shared": (lambda: Shared(), image),
}
