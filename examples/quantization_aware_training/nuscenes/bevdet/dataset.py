"""Scenes for the bird's-eye view: bars around four cameras, drawn larger the closer they are, or your own arrays."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from model import DEPTHS, GRID
from torch import Tensor

CAMERAS, HEIGHT, WIDTH, STRIDE = 4, 16, 32, 4  # STRIDE of the image backbone
NEAR, FAR = 2.0, 9.0  # metres; the map covers GRID x GRID of them
Scenes = tuple[Tensor, Tensor, Tensor]  # images, cells, heat


def bars(count: int, seed: int) -> Scenes:
    """One to three bars per scene; the rig is turned by a random angle, which only `cells` tells."""
    g = torch.Generator().manual_seed(seed)
    images = 0.2 * torch.randn(count, CAMERAS, 3, HEIGHT, WIDTH, generator=g)
    heat = torch.zeros(count, 1, GRID, GRID)
    turns = (torch.rand(count, generator=g) * math.pi / 2).tolist()
    for i, turn in enumerate(turns):
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            angle, distance = torch.rand(2, generator=g).tolist()
            angle, distance = angle * 2 * math.pi, NEAR + distance * (FAR - 2 - NEAR)
            draw(images[i], angle - turn, distance)
            mark(heat[i, 0], distance * math.cos(angle), distance * math.sin(angle))
    return images, torch.stack([cells(turn) for turn in turns]), heat


def draw(views: Tensor, angle: float, distance: float) -> None:
    camera = round(angle / (math.pi / 2)) % CAMERAS
    column = WIDTH / 2 * (1 + math.tan(angle - round(angle / (math.pi / 2)) * math.pi / 2))
    half, tall = max(round(5 / distance), 1), min(round(24 / distance), HEIGHT)
    left, top = max(int(column) - half, 0), (HEIGHT - tall) // 2
    views[camera, :, top : top + tall, left : int(column) + half + 1] += torch.tensor([1.0, 0.5, -0.5])[
        :, None, None
    ]


def mark(heat: Tensor, x: float, y: float) -> None:
    """1 in the cell of the object, less around it."""
    rows = torch.arange(GRID)
    row, column = int(y + GRID / 2), int(x + GRID / 2)
    distance = (rows[:, None] - row).square() + (rows[None, :] - column).square()
    heat.copy_(heat.maximum(torch.exp(-distance.float())))


def cells(turn: float) -> Tensor:
    """The map cell of (camera, depth bin, row, column), flattened."""
    depth = torch.linspace(NEAR, FAR, DEPTHS)[None, :, None, None]
    across = (torch.arange(WIDTH // STRIDE) + 0.5) * 2 * STRIDE / WIDTH - 1
    ahead = turn + torch.arange(CAMERAS)[:, None, None, None] * math.pi / 2
    angle = (ahead + across.atan()).expand(CAMERAS, DEPTHS, HEIGHT // STRIDE, -1)
    x, y = (depth * angle.cos() + GRID / 2).long(), (depth * angle.sin() + GRID / 2).long()
    inside = (x >= 0) & (x < GRID) & (y >= 0) & (y < GRID)
    return torch.where(inside, y * GRID + x, GRID * GRID).flatten()


def arrays(file: Path, most: int) -> Scenes:
    """`images`, `cells` and `heat` of an .npz, as the model takes them: made from nuScenes with its own tools."""
    found = np.load(file)
    images, where, heat = (torch.from_numpy(found[name][:most]) for name in ("images", "cells", "heat"))
    return images.float(), where.long(), heat.float()
