"""Real weights and data for accuracy figures: SPARSEBIT_ASSETS, or ../shared/assets beside the project.

Plain re-statements of the two architectures, so that neither torchvision nor a hub is needed.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ASSETS = Path(os.environ.get("SPARSEBIT_ASSETS", Path(__file__).resolve().parents[2] / "shared" / "assets"))
MEAN, STD = (
    torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1),
    torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1),
)
MISSING = (
    "" if ASSETS.is_dir() else f"no assets at {ASSETS}; set SPARSEBIT_ASSETS to the folder with real weights"
)


# -- CIFAR-10 ---------------------------------------------------------------------------------------
class CifarBlock(nn.Module):
    """Two 3x3 convolutions; where the size changes, the shortcut takes every other pixel and pads channels."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.pad = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.pad:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(out + x)


class CifarResNet(nn.Module):
    def __init__(self, depth: int = 20):
        super().__init__()
        n = (depth - 2) // 6
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, n, 1)
        self.layer2 = self._stage(16, 32, n, 2)
        self.layer3 = self._stage(32, 64, n, 2)
        self.linear = nn.Linear(64, 10)

    @staticmethod
    def _stage(inputs: int, outputs: int, n: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            CifarBlock(inputs, outputs, stride), *[CifarBlock(outputs, outputs, 1) for _ in range(n - 1)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.avg_pool2d(x, x.size()[3]).flatten(1))


def cifar_resnet(depth: int) -> CifarResNet:
    file = next((ASSETS / "resnet_cifar10").glob(f"resnet{depth}-*.th"))
    state = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    net = CifarResNet(depth)
    net.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
    return net.eval()


def cifar10(part: str = "test", n: int | None = None) -> tuple[Tensor, Tensor]:
    """Normalised images and labels of `test` (10,000) or `train20k`."""
    data = np.load(ASSETS / "cifar10" / f"{part}.npz")
    x = torch.from_numpy(data["x"][:n]).permute(0, 3, 1, 2).float() / 255
    return ((x - MEAN) / STD).contiguous(), torch.from_numpy(data["y"][:n]).long()


# -- MobileNetV2 ------------------------------------------------------------------------------------
def conv_bn_relu6(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int):
        super().__init__()
        hidden = inputs * expand
        self.shortcut = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([conv_bn_relu6(inputs, hidden, 1)] if expand != 1 else []),
            conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    ROWS = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn_relu6(3, 32, 3, 2)]
        inputs = 32
        for expand, outputs, n, stride in self.ROWS:
            for i in range(n):
                layers.append(InvertedResidual(inputs, outputs, stride if i == 0 else 1, expand))
                inputs = outputs
        layers.append(conv_bn_relu6(inputs, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


def mobilenet_v2(pretrained: bool = True) -> MobileNetV2:
    net = MobileNetV2()
    if pretrained:
        file = next((ASSETS / "mobilenet_v2").glob("*.pth"))
        net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return net.eval()


def imagenet() -> tuple[Tensor, Tensor]:
    """1,000 images, one per class (centre crop 224, normalised), and their class indices."""
    from PIL import Image

    images = []
    with zipfile.ZipFile(ASSETS / "imagenet1k_256.zip") as archive:
        names = sorted(n for n in archive.namelist() if n.lower().endswith((".jpeg", ".jpg")))
        for name in names:
            pixels = np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB"))
            top, left = (pixels.shape[0] - 224) // 2, (pixels.shape[1] - 224) // 2
            crop = torch.from_numpy(pixels[top : top + 224, left : left + 224].copy())
            images.append((crop.permute(2, 0, 1).float() / 255 - MEAN) / STD)
    return torch.stack(images), torch.arange(len(images))


def split_imagenet() -> tuple[Tensor, Tensor, Tensor]:
    """(calibration images: every 4th, evaluation images, evaluation labels)."""
    x, y = imagenet()
    calibration = torch.arange(len(x)) % 4 == 0
    return x[calibration], x[~calibration], y[~calibration]


# -- measures ---------------------------------------------------------------------------------------
@torch.no_grad()
def logits(model: nn.Module, x: Tensor, batch: int = 125) -> Tensor:
    return torch.cat([model(part) for part in x.split(batch)])


def top1(out: Tensor, y: Tensor) -> float:
    return (out.argmax(1) == y).float().mean().item() * 100


def sqnr(reference: Tensor, out: Tensor) -> float:
    """Signal to quantization noise of the logits, in dB: sharper than top-1 of a few hundred images."""
    return (10 * torch.log10(reference.pow(2).sum() / (reference - out).pow(2).sum())).item()
