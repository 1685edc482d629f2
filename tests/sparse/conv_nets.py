"""Small convolutional networks as people write them, for pruning."""

from __future__ import annotations

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
