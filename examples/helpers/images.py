"""Pictures for the examples: generated stripes in ten directions, CIFAR-10, or a folder of images.

Stripes need no file and are learned in seconds; what quantization costs shows on them as on photographs.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
Split = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # images and labels to train with, images and labels to test with


def stripes(count: int, size: int, seed: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Noisy stripes of any colour and width; the label is their direction."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g)
    labels = torch.arange(count) % classes
    angle = math.pi * (labels[:, None, None] + 0.6 * rand(count, 1, 1) - 0.3) / classes
    line = torch.linspace(0, 1, size)
    along = angle.cos() * line[None, None, :] + angle.sin() * line[None, :, None]
    waves = torch.sin(2 * math.pi * (along * (3 + 3 * rand(count, 1, 1)) + rand(count, 1, 1)))
    colour = torch.randn(count, 3, 1, 1, generator=g)
    noise = torch.randn(count, 3, size, size, generator=g)
    return colour * waves[:, None] + 0.5 * noise, labels


def cifar10(folder: Path, most: int) -> Split:
    """CIFAR-10: `cifar-10-batches-bin` (its binary version), or train*.npz and test.npz with `x` (NHWC) and `y`."""
    if list(folder.glob("*.npz")):
        parts = [np.load(next(folder.glob(f"{name}*.npz"))) for name in ("train", "test")]
        pairs = [(part["x"].transpose(0, 3, 1, 2), part["y"]) for part in parts]
    else:
        names = [f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]
        rows = [np.concatenate([np.fromfile(folder / n, np.uint8) for n in part]) for part in names]
        rows = [part.reshape(-1, 3073) for part in rows]
        pairs = [(part[:, 1:].reshape(-1, 3, 32, 32), part[:, 0]) for part in rows]
    (x, y), (x_test, y_test) = ((_normal(x[:most]), torch.from_numpy(y[:most]).long()) for x, y in pairs)
    return x, y, x_test, y_test


def image_folder(folder: Path, size: int, most: int) -> Split:
    """`train/CLASS/*` and `val/CLASS/*`, as ImageNet is usually kept: `most` of each, evenly spaced."""
    classes = {path.name: i for i, path in enumerate(sorted((folder / "val").iterdir()))}
    found: list[Tensor] = []
    for part in ("train", "val"):
        files = sorted(file for file in (folder / part).glob("*/*") if file.is_file())
        files = files[:: max(len(files) // most, 1)][:most]
        found.append(torch.stack([_read(file, size) for file in files]))
        found.append(torch.tensor([classes[file.parent.name] for file in files]))
    return found[0], found[1], found[2], found[3]


def load(data: Path | None, size: int, samples: int) -> Split:
    """What --data names: nothing (stripes), CIFAR-10, or a folder of images."""
    if data is None:
        return *stripes(samples, size, 0), *stripes(max(samples // 4, 200), size, 1)
    return image_folder(data, size, samples) if (data / "val").is_dir() else cifar10(data, samples)


def _normal(pixels: np.ndarray) -> Tensor:
    return (torch.from_numpy(np.array(pixels)).float() / 255 - MEAN) / STD


def _read(file: Path, size: int) -> Tensor:
    """Scaled so that the short side is 8/7 of `size`, and cropped in the middle."""
    from PIL import Image

    with Image.open(file) as opened:
        image = opened.convert("RGB")
    scale = size * 8 / 7 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)))
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return _normal(np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1))
