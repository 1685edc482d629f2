"""Pictures with boxes: generated squares of three colours, or COCO."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MOST = 20  # boxes per picture


def squares(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise with one to three squares; the class is the colour channel that is bright."""
    g = torch.Generator().manual_seed(seed)
    x = 0.3 * torch.randn(count, 3, size, size, generator=g)
    boxes = torch.full((count, MOST, 5), -1.0)
    for i in range(count):
        for j in range(int(torch.randint(1, 4, (1,), generator=g))):
            side = int(torch.randint(8, 32, (1,), generator=g))
            left, top = torch.randint(0, size - side, (2,), generator=g).tolist()
            label = int(torch.randint(3, (1,), generator=g))
            x[i, :, top : top + side, left : left + side] -= 0.5
            x[i, label, top : top + side, left : left + side] += 1.5
            boxes[i, j] = torch.tensor([left, top, left + side, top + side, label])
    return x, boxes


def coco(folder: Path, part: str, size: int, most: int) -> tuple[Tensor, Tensor]:
    """`folder` holds annotations/instances_PART.json and the folder PART; pictures are squeezed to size x size."""
    from PIL import Image

    about = json.loads((folder / "annotations" / f"instances_{part}.json").read_text())
    labels = {c["id"]: i for i, c in enumerate(sorted(about["categories"], key=lambda c: c["id"]))}
    pictures = {p["id"]: (i, p) for i, p in enumerate(about["images"][:most])}
    x, boxes = torch.zeros(len(pictures), 3, size, size), torch.full((len(pictures), MOST, 5), -1.0)
    counts = [0] * len(pictures)
    for i, picture in pictures.values():
        with Image.open(folder / part / picture["file_name"]) as opened:
            pixels = np.array(opened.convert("RGB").resize((size, size)), dtype=np.float32)
        x[i] = torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1
    for entry in about["annotations"]:
        i, picture = pictures.get(entry["image_id"], (-1, None))
        if picture is None or counts[i] == MOST or min(entry["bbox"][2:]) < 1:
            continue
        left, top, width, height = entry["bbox"]
        scale = torch.tensor([size / picture["width"], size / picture["height"]]).repeat(2)
        box = torch.tensor([left, top, left + width, top + height]) * scale
        boxes[i, counts[i]] = torch.cat([box, torch.tensor([float(labels[entry["category_id"]])])])
        counts[i] += 1
    return x, boxes
