"""A small bird's-eye-view detector in the manner of BEVDet: several cameras and their geometry in, a map out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRID, DEPTHS, CHANNELS = 16, 8, 16  # cells of a side of the map; depth bins; channels of the map


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class BevDet(nn.Module):
    """`images` (batch, cameras, 3, height, width); `cells`: the map cell of each lifted pixel, GRID^2 if outside."""

    def __init__(self) -> None:
        super().__init__()
        self.img_backbone = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2), conv(32, 32))
        self.depth_net = nn.Conv2d(32, DEPTHS + CHANNELS, 1)
        self.bev_down, self.bev_inner = conv(CHANNELS, 32, 2), conv(32, 32)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.bev_out = conv(32 + CHANNELS, 16)
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, images: Tensor, cells: Tensor) -> Tensor:
        batch = images.shape[0]
        x = self.depth_net(self.img_backbone(images.flatten(0, 1)))
        depth, feature = x[:, :DEPTHS].softmax(1), x[:, DEPTHS:]
        lifted = depth[:, None] * feature[:, :, None]  # every pixel at every depth, as much as it is there
        lifted = lifted.reshape(batch, -1, CHANNELS, cells.shape[1] // (images.shape[1])).transpose(1, 2)
        lifted = lifted.reshape(batch, CHANNELS, -1)
        where = cells[:, None].expand(-1, CHANNELS, -1)
        bev = lifted.new_zeros(batch, CHANNELS, GRID * GRID + 1).scatter_add(2, where, lifted)
        bev = bev[:, :, : GRID * GRID].reshape(batch, CHANNELS, GRID, GRID)
        deep = self.up(self.bev_inner(self.bev_down(bev)))
        return self.head(self.bev_out(torch.cat([bev, deep], 1)))


def loss(model: nn.Module, images: Tensor, cells: Tensor, heat: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(images, cells), heat, 1 + 9 * heat)


def f1(maps: Tensor, heat: Tensor) -> float:
    """Peaks above 0.4 that lie within a cell of a true one, in per cent."""
    peaks = (maps == F.max_pool2d(maps, 3, 1, 1)) & (maps.sigmoid() > 0.4)
    truth = heat == 1
    near = lambda mask: F.max_pool2d(mask.float(), 3, 1, 1) > 0
    right, found = (truth & near(peaks)).sum(), (peaks & near(truth)).sum()
    recall, precision = right / truth.sum(), found / peaks.sum().clamp(min=1)
    return (200 * recall * precision / (recall + precision).clamp(min=1e-6)).item()
