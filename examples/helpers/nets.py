"""The networks of the image examples, small enough for a CPU: a ResNet and a vision transformer (DeiT)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from helpers import images, loops
from helpers.transformer import Layer
from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A stage per width, each half as large as the one before; `patch` is the stride of the stem."""

    def __init__(
        self, classes: int = 10, widths: tuple[int, ...] = (16, 32, 64), blocks: int = 1, patch: int = 1
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(
            3, widths[0], 3 if patch == 1 else 2 * patch - 1, patch, patch - 1 or 1, bias=False
        )
        self.bn1 = nn.BatchNorm2d(widths[0])
        stages, inputs = [], widths[0]
        for i, width in enumerate(widths):
            first = Residual(inputs, width, 1 if i == 0 else 2)
            stages.append(nn.Sequential(first, *(Residual(width, width, 1) for _ in range(blocks - 1))))
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class DeiT(nn.Module):
    """A vision transformer with a class token and learned positions."""

    def __init__(
        self, classes: int = 10, size: int = 64, patch: int = 8, dim: int = 64, depth: int = 3, heads: int = 4
    ):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (size // patch) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*(Layer(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def named(spec: str | None, weights: Path | None, default: nn.Module) -> nn.Module:
    """What --model and --weights name: `timm:NAME` or `torchvision:NAME` with a state_dict, or the example's own."""
    package, _, name = (spec or "").partition(":")
    if package == "timm":
        import timm

        default = timm.create_model(name, pretrained=False)
    elif package == "torchvision":
        import torchvision

        default = torchvision.models.get_model(name, weights=None)
    elif package:
        raise SystemExit(f"--model {spec}: takes timm:NAME or torchvision:NAME")
    if weights is not None:
        default.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return default


def start(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    net: Callable[[int], nn.Module],
    size: int,
    lr: float = 5e-3,
) -> tuple[argparse.Namespace, nn.Module, images.Split]:
    """How the image examples begin: the command line, the pictures, and a float model that knows them."""
    parser.add_argument("--size", type=int, default=size, help=f"of the pictures (default {size})")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    split = images.load(args.data, args.size, args.samples)
    model = named(args.model, args.weights, net(args.size))
    loops.fit(model, split[:2], args.epochs, lr)
    return args, model.eval(), split
