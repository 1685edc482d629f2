"""Two networks as people write them: a YOLO with C2f, SiLU and DFL, and a segmentation net; and shapes to train on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BINS, SIZE, CLASSES = 16, 64, 3


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class C2f(nn.Module):
    """Two halves; one goes through bottlenecks, and every step of it is kept."""

    def __init__(self, channels: int, blocks: int):
        super().__init__()
        half = channels // 2
        self.first, self.last = conv(channels, channels), conv((2 + blocks) * half, channels)
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(half, half, 3), conv(half, half, 3)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """Two scales; boxes are expectations over 16 bins (DFL), scores are logits per class."""

    def __init__(self, classes: int = 4):
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), C2f(32, 2))
        self.down = nn.Sequential(conv(32, 32, 3, 2), C2f(32, 1))
        self.up = C2f(32, 1)
        self.mix = conv(64, 32)
        self.boxes, self.scores = nn.Conv2d(32, 4 * BINS, 1), nn.Conv2d(32, classes, 1)
        self.project = nn.Conv2d(BINS, 1, 1, bias=False)
        self.project.weight.data = torch.arange(BINS, dtype=torch.float).view(1, BINS, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.stem(x)
        coarse = self.down(fine)
        fine = self.up(self.mix(torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1)))
        boxes = torch.cat([self.boxes(f).flatten(2) for f in (fine, coarse)], 2)
        scores = torch.cat([self.scores(f).flatten(2) for f in (fine, coarse)], 2)
        bins = boxes.view(x.shape[0], 4, BINS, -1).transpose(1, 2).softmax(1)
        return self.project(bins).squeeze(1), scores


class Segmenter(nn.Module):
    """An encoder, pooling at two sizes, a decoder that adds what it left behind; a class per pixel."""

    def __init__(self, classes: int = 5):
        super().__init__()
        relu = nn.ReLU()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), relu)
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1, groups=2), nn.BatchNorm2d(32), relu)
        self.pooled, self.lateral = nn.Conv2d(32, 32, 1), nn.Conv2d(16, 32, 1)
        self.head = nn.Conv2d(32, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        context = F.interpolate(self.pooled(F.adaptive_avg_pool2d(second, 2)), second.shape[-2:])
        joined = self.lateral(first) + F.interpolate(second * context.sigmoid(), scale_factor=2.0)
        return F.interpolate(self.head(joined), scale_factor=2.0, mode="bilinear")


# -- shapes ------------------------------------------------------------------------------------------------
def shapes(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures with one rectangle, disc or cross each on noise, a colour for each kind.

    Returns images, masks (0: nothing) and boxes (x1 y1 x2 y2).
    """
    g = torch.Generator().manual_seed(seed)
    centre = 20 + 24 * torch.rand(n, 2, generator=g)
    half = 6 + 12 * torch.rand(n, 2, generator=g)
    kind = torch.randint(CLASSES, (n,), generator=g)
    half[kind == 1] = half[kind == 1][:, :1]  # discs are round
    grid = torch.arange(SIZE, dtype=torch.float) + 0.5
    dx = (grid.view(1, 1, -1) - centre[:, 0].view(-1, 1, 1)) / half[:, 0].view(-1, 1, 1)
    dy = (grid.view(1, -1, 1) - centre[:, 1].view(-1, 1, 1)) / half[:, 1].view(-1, 1, 1)
    box = (dx.abs() <= 1) & (dy.abs() <= 1)
    disc, cross = dx**2 + dy**2 <= 1, box & ((dx.abs() <= 0.35) | (dy.abs() <= 0.35))
    inside = torch.stack([box, disc, cross], 1)[torch.arange(n), kind]
    colour = F.one_hot(kind, 3).view(n, 3, 1, 1) + 0.4 * torch.rand(n, 3, 1, 1, generator=g)
    images = 0.3 * torch.randn(n, 3, SIZE, SIZE, generator=g) + inside.unsqueeze(1) * colour
    boxes = torch.cat([centre - half, centre + half], 1)
    return images, inside * (kind + 1).view(-1, 1, 1), boxes


def anchors() -> tuple[Tensor, Tensor]:
    """Middle and stride of each place of the two scales, in the order of the outputs."""
    middles, strides = [], []
    for stride in (4, 8):
        middle = torch.arange(stride / 2, SIZE, stride)
        y, x = torch.meshgrid(middle, middle, indexing="ij")
        middles.append(torch.stack([x.flatten(), y.flatten()]))
        strides.append(torch.full((y.numel(),), float(stride)))
    return torch.cat(middles, 1), torch.cat(strides)


def decode(boxes: Tensor) -> Tensor:
    """Distances to the four sides, in strides, as corners: (N, 4, places)."""
    middle, stride = anchors()
    return torch.cat([middle - boxes[:, :2] * stride, middle + boxes[:, 2:] * stride], 1)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes, corners on axis 1."""
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    area = lambda x: (x[:, 2:] - x[:, :2]).clamp_min(0).prod(1)
    both = (high - low).clamp_min(0).prod(1)
    return both / (area(a) + area(b) - both).clamp_min(1e-9)


def found_boxes(boxes: Tensor, scores: Tensor) -> Tensor:
    """The box with the best score of each picture: (N, 4)."""
    best = scores.amax(1).argmax(1)
    return decode(boxes)[torch.arange(len(boxes)), :, best]


def box_loss(net: nn.Module, images: Tensor, masks: Tensor, boxes: Tensor) -> Tensor:
    """Places in the middle third of a shape answer for it."""
    middle, stride = anchors()
    centre, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    inside = ((middle - centre.unsqueeze(2)).abs() < size.unsqueeze(2) / 6 + stride / 4).all(1)
    kind = masks.flatten(1).amax(1) - 1
    found, scores = net(images)
    wanted = inside.unsqueeze(1) * F.one_hot(kind, scores.shape[1]).unsqueeze(2)
    rows = decode(found).transpose(1, 2)[inside]
    apart = 1 - overlap(rows, boxes[torch.nonzero(inside)[:, 0]])
    return (
        F.binary_cross_entropy_with_logits(scores, wanted.float(), pos_weight=torch.tensor(20.0))
        + apart.mean()
    )


def pixel_loss(net: nn.Module, images: Tensor, masks: Tensor, boxes: Tensor) -> Tensor:
    return F.cross_entropy(net(images), masks)


def trained(net: nn.Module, loss: Callable[..., Tensor], steps: int) -> nn.Module:
    """The net after `steps` batches of 16 shapes."""
    frozen = getattr(net, "project", None)
    if frozen is not None:
        frozen.requires_grad_(False)  # 0, 1, ... 15: the distances themselves
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss(net.train(), *shapes(16, 1000 + step)).backward()
        optimizer.step()
        schedule.step()
    return net.eval()
