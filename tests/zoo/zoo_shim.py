"""torchvision without its C++ ops: the wheel is a CUDA build that does not load beside a CPU torch.

Declaring the schemas makes its models importable; nms in plain torch lets whole detectors run.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library: list[torch.library.Library] = []  # a Library lives as long as somebody holds it


def install() -> None:
    """Call before torchvision is imported; does nothing where the ops exist or where it was called already."""
    if _library or _has_ops():
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CPU")
    _library.append(library)
    try:
        import torchvision

        torchvision.extension._has_ops = lambda: True
    except ImportError:
        return


def _has_ops() -> bool:
    try:
        import torchvision
    except (ImportError, RuntimeError):
        return False
    return bool(torchvision.extension._has_ops())


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression: best box first, drop what overlaps it."""
    area = (boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(1)
    corner = torch.maximum(boxes[:, None, :2], boxes[:, :2]), torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = (corner[1] - corner[0]).clamp_min(0).prod(2)
    overlaps = shared > iou_threshold * (area[:, None] + area - shared)
    kept: list[int] = []
    dropped = torch.zeros(len(boxes), dtype=torch.bool)
    for i in scores.argsort(descending=True).tolist():
        if not dropped[i]:
            kept.append(i)
            dropped |= overlaps[i]
    return torch.tensor(kept, dtype=torch.long)
