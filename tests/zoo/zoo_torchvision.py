"""torchvision models: classification of every family, segmentation, detection, video, flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo_run import Case

CLASSIFICATION = [
    "alexnet",
    "vgg11_bn",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "densenet121",
    "densenet169",
    "googlenet",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "mnasnet0_5",
    "mnasnet0_75",
    "mnasnet1_0",
    "mnasnet1_3",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5",
    "shufflenet_v2_x2_0",
    "squeezenet1_0",
    "squeezenet1_1",
    "efficientnet_b0",
    "efficientnet_b1",
    "efficientnet_b2",
    "efficientnet_b3",
    "efficientnet_v2_s",
    "regnet_x_400mf",
    "regnet_x_800mf",
    "regnet_x_1_6gf",
    "regnet_x_3_2gf",
    "regnet_y_400mf",
    "regnet_y_800mf",
    "regnet_y_1_6gf",
    "regnet_y_3_2gf",
    "convnext_tiny",
    "convnext_small",
    "swin_t",
    "swin_s",
    "swin_v2_t",
    "swin_v2_s",
]
QUANTIZABLE = [
    "quantized_resnet18",
    "quantized_mobilenet_v2",
    "quantized_mobilenet_v3_large",
    "quantized_shufflenet_v2_x0_5",
    "quantized_googlenet",
]
SEGMENTATION = [
    "fcn_resnet50",
    "deeplabv3_resnet50",
    "deeplabv3_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
]
BACKBONES = [
    "fasterrcnn_resnet50_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "retinanet_resnet50_fpn",
    "retinanet_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
]
VIDEO = ["r3d_18", "mc3_18", "r2plus1d_18", "swin3d_t"]
UNTRAINED = {"weights": None, "weights_backbone": None}


def _get(name: str, options: dict[str, Any], part: str = "") -> nn.Module:
    from torchvision import models

    model: nn.Module = models.get_model(name, **{"weights": None, **options})
    return model.get_submodule(part)


def _small_maxvit() -> nn.Module:
    """maxvit_t is bound to images of 224; its class is not."""
    from torchvision.models.maxvit import MaxVit

    return MaxVit(
        input_size=(64, 64),
        stem_channels=32,
        partition_size=4,
        block_channels=[32, 64],
        block_layers=[1, 2],
        head_dim=16,
        stochastic_depth_prob=0.0,
    )


def _small_mvit(second: bool) -> nn.Module:
    """mvit_v1_b and mvit_v2_s are bound to 16 frames of 224; their class is not."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 32, 64, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 64, 64, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=blocks,
        residual_pool=second,
        residual_with_cls_embed=not second,
        rel_pos_embed=second,
        proj_after_attn=second,
    )


def noise(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape)


IMAGES = noise(2, 3, 64, 64)


def case(name: str, batch: Callable[[], Any] = IMAGES, part: str = "", **options: Any) -> Case:
    shown = f"{name}-{part}" if part else name
    return Case("torchvision", shown, lambda: _get(name, options, part), batch)


def images() -> tuple[list[torch.Tensor]]:
    """What detectors take: one list of images."""
    return ([torch.rand(3, 64, 64), torch.rand(3, 64, 64)],)


CASES = [
    *[case(name) for name in CLASSIFICATION],
    case("inception_v3", noise(2, 3, 96, 96), init_weights=True),
    case("vit_b_16", image_size=64),
    case("vit_b_32", image_size=64),
    Case("torchvision", "maxvit", _small_maxvit, noise(2, 3, 64, 64)),
    *[case(name, quantize=False) for name in QUANTIZABLE],
    *[case(name, **UNTRAINED) for name in SEGMENTATION],
    *[case(name, part="backbone", **UNTRAINED) for name in BACKBONES],
    *[case(name, noise(2, 3, 8, 32, 32)) for name in VIDEO],
    Case("torchvision", "mvit_v1", lambda: _small_mvit(False), noise(2, 3, 4, 32, 32)),
    Case("torchvision", "mvit_v2", lambda: _small_mvit(True), noise(2, 3, 4, 32, 32)),
    case("raft_small", lambda: (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128))),
    case("retinanet_resnet50_fpn", images, min_size=64, max_size=64, **UNTRAINED),
    case("fcos_resnet50_fpn", images, min_size=64, max_size=64, **UNTRAINED),
    case("ssdlite320_mobilenet_v3_large", images, **UNTRAINED),
]
