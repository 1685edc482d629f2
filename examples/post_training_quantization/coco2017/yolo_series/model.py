"""A small detector in the manner of YOLOv3: a backbone, a path back up, a head at two strides; no anchors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDES = (8, 16)
SMALL = 20  # boxes whose longer side is below it belong to the first head


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1))


class Yolo(nn.Module):
    """Per cell: is something here, where in the cell, log size in strides, classes. A map per stride."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 2), conv(width, 2 * width, 2))
        self.down8, self.down16 = conv(2 * width, 4 * width, 2), conv(4 * width, 8 * width, 2)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.neck = conv(12 * width, 4 * width)
        self.head8, self.head16 = nn.Conv2d(4 * width, 5 + classes, 1), nn.Conv2d(8 * width, 5 + classes, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.down8(self.stem(x))
        coarse = self.down16(fine)
        fine = self.neck(torch.cat([fine, self.up(coarse)], 1))
        return self.head8(fine), self.head16(coarse)


def targets(boxes: Tensor, size: int, classes: int) -> list[Tensor]:
    """`boxes` (pictures, n, 5: x1 y1 x2 y2 class, class -1: none) as the maps that the heads should give."""
    maps = [torch.zeros(len(boxes), 5 + classes, size // s, size // s) for s in STRIDES]
    for i, j in (boxes[..., 4] >= 0).nonzero().tolist():
        x1, y1, x2, y2, label = boxes[i, j].tolist()
        level = 0 if max(x2 - x1, y2 - y1) < SMALL else 1
        stride = STRIDES[level]
        cx, cy = (x1 + x2) / 2 / stride, (y1 + y2) / 2 / stride
        cell = maps[level][i, :, min(int(cy), size // stride - 1), min(int(cx), size // stride - 1)]
        sizes = torch.tensor([(x2 - x1) / stride, (y2 - y1) / stride]).log()
        cell[:5] = torch.tensor([1.0, cx % 1, cy % 1, *sizes.tolist()])
        cell[5:] = F.one_hot(torch.tensor(int(label)), classes)
    return maps


def loss(model: nn.Module, x: Tensor, *wanted: Tensor) -> Tensor:
    total = torch.zeros(())
    for got, want in zip(model(x), wanted):
        there = want[:, 0] > 0
        weight = 1 + 9 * want[:, 0]  # most cells are empty
        total = total + F.binary_cross_entropy_with_logits(got[:, 0], want[:, 0], weight)
        if there.any():
            got, want = got.movedim(1, -1)[there], want.movedim(1, -1)[there]
            total = (
                total
                + F.mse_loss(got[:, 1:3].sigmoid(), want[:, 1:3])
                + F.mse_loss(got[:, 3:5], want[:, 3:5])
            )
            total = total + F.cross_entropy(got[:, 5:], want[:, 5:])
    return total


def decode(maps: tuple[Tensor, ...], threshold: float = 0.2) -> list[Tensor]:
    """Per picture (n, 6): x1 y1 x2 y2 class score, best first, without boxes that repeat a better one."""
    found: list[list[Tensor]] = [[] for _ in range(len(maps[0]))]
    for level, stride in zip(maps, STRIDES):
        scores = level[:, 0].sigmoid() * level[:, 5:].softmax(1).amax(1)
        for i, row, column in (scores > threshold).nonzero().tolist():
            cell = level[i, :, row, column]
            centre = (cell[1:3].sigmoid() + torch.tensor([column, row])) * stride
            half = cell[3:5].exp() * stride / 2
            label, score = cell[5:].argmax().reshape(1), scores[i, row, column].reshape(1)
            found[i].append(torch.cat([centre - half, centre + half, label, score]))
    return [suppress(torch.stack(boxes)) if boxes else torch.zeros(0, 6) for boxes in found]


def suppress(boxes: Tensor, limit: float = 0.5) -> Tensor:
    boxes, kept = boxes[boxes[:, 5].argsort(descending=True)], []
    while len(boxes):
        kept.append(boxes[0])
        boxes = boxes[(overlap(boxes[0], boxes) < limit) | (boxes[:, 4] != boxes[0, 4])]
    return torch.stack(kept)


def overlap(box: Tensor, others: Tensor) -> Tensor:
    """Intersection over union."""
    low, high = box[:2].maximum(others[:, :2]), box[2:4].minimum(others[:, 2:4])
    common = (high - low).clamp(min=0).prod(1)
    area = lambda b: (b[..., 2:4] - b[..., :2]).prod(-1)
    return common / (area(box) + area(others) - common)


def mean_average_precision(found: list[Tensor], truth: Tensor, classes: int) -> float:
    """AP at an overlap of 0.5, mean over the classes that occur, in per cent."""
    precisions = []
    for label in range(classes):
        wanted = [boxes[boxes[:, 4] == label] for boxes in truth]
        total = sum(map(len, wanted))
        if not total:
            continue
        rows = [
            (box[5].item(), i, box) for i, boxes in enumerate(found) for box in boxes[boxes[:, 4] == label]
        ]
        hits, used = [], [torch.zeros(len(boxes), dtype=torch.bool) for boxes in wanted]
        for _, i, box in sorted(rows, key=lambda row: -row[0]):
            overlaps = overlap(box, wanted[i]) * ~used[i] if len(wanted[i]) else torch.zeros(1)
            best = int(overlaps.argmax())
            hits.append(overlaps[best].item() >= 0.5)
            if hits[-1]:
                used[i][best] = True
        right = torch.tensor(hits, dtype=torch.float32).cumsum(0)
        precision = right / torch.arange(1, len(hits) + 1)
        precision = precision.flip(0).cummax(0).values.flip(0) if len(hits) else precision
        precisions.append((precision * torch.tensor(hits)).sum().item() / total)
    return 100 * sum(precisions) / max(len(precisions), 1)
