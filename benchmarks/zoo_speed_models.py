"""The models of zoo_speed.py: of torchvision and timm by name, and some written here. All with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TORCHVISION = [
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "regnet_y_400mf",
    "regnet_x_400mf",
    "densenet121",
    "googlenet",
    "inception_v3",
    "squeezenet1_1",
    "mnasnet1_0",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
    "vgg11_bn",
    "alexnet",
]
TIMM = [
    "mobilenetv2_100",
    "mobilenetv4_conv_small",
    "efficientnet_lite0",
    "tf_efficientnet_lite0",
    "tf_efficientnet_b0",
    "ghostnet_100",
    "repvgg_a0",
    "mobileone_s0",
    "lcnet_050",
    "tinynet_e",
    "fbnetc_100",
    "rexnet_100",
    "hardcorenas_a",
    "mixnet_s",
    "dla34",
    "res2net50_26w_4s",
    "hgnetv2_b0",
    "cspresnet50",
    "regnetz_005",
    "fastvit_t8",
]
TIMM_OTHER = [
    "convnext_atto",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "mobilevit_s",
    "poolformer_s12",
]
SEGMENTATION = ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"]


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[int], list[Any]]
    cnn: bool = True
    free_batch: bool = True


def images(size: int = 224, channels: int = 3) -> Callable[[int], list[Tensor]]:
    def make(count: int) -> list[Tensor]:
        # smooth pictures: neighbours are alike, as in photographs
        small = torch.randn(count, channels, max(size // 8, 1), max(size // 8, 1))
        return list(F.interpolate(small, size=(size, size), mode="bilinear").split(1))

    return make


def tokens(length: int = 64, words: int = 1000) -> Callable[[int], list[Tensor]]:
    return lambda count: list(torch.randint(words, (count, length)).split(1))


def settled(model: nn.Module, batch: Any) -> nn.Module:
    """With the statistics of its batch norms on some data, as after training."""
    from zoo_run import waken

    return waken(model, batch)


class ConvBnSiLU(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(outputs), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class C2f(nn.Module):
    """Half of the channels pass through a chain; all of its values are joined."""

    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        half = width // 2
        self.first, self.last = ConvBnSiLU(width, width), ConvBnSiLU(half * (2 + depth), width)
        self.chain = nn.ModuleList(
            nn.Sequential(ConvBnSiLU(half, half, 3), ConvBnSiLU(half, half, 3)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.chain:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """Three scales, SiLU, C2f, a pooling pyramid, a neck, decoupled heads with distributions of distances."""

    def __init__(self, classes: int = 20, bins: int = 16) -> None:
        super().__init__()
        widths = [16, 32, 64, 128, 256]
        self.stem = ConvBnSiLU(3, widths[0], 3, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(ConvBnSiLU(a, b, 3, 2), C2f(b, 1 + (i > 0)))
            for i, (a, b) in enumerate(pairwise(widths))
        )
        self.squeeze, self.pool, self.spread = (
            ConvBnSiLU(256, 128),
            nn.MaxPool2d(5, 1, 2),
            ConvBnSiLU(512, 256),
        )
        self.up4, self.up3 = (
            nn.Sequential(ConvBnSiLU(384, 128), C2f(128)),
            nn.Sequential(ConvBnSiLU(192, 64), C2f(64)),
        )
        self.boxes = nn.ModuleList(
            nn.Sequential(ConvBnSiLU(c, 64, 3), nn.Conv2d(64, 4 * bins, 1)) for c in (64, 128, 256)
        )
        self.scores = nn.ModuleList(
            nn.Sequential(ConvBnSiLU(c, 64, 3), nn.Conv2d(64, classes, 1)) for c in (64, 128, 256)
        )
        self.bins = bins
        self.register_buffer("steps", torch.arange(bins).float())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        x = self.squeeze(x)
        pools = [x, self.pool(x)]
        pools += [self.pool(pools[-1])]
        pools += [self.pool(pools[-1])]
        p5 = self.spread(torch.cat(pools, 1))
        p4 = self.up4(torch.cat([F.interpolate(p5, scale_factor=2.0), levels[2]], 1))
        p3 = self.up3(torch.cat([F.interpolate(p4, scale_factor=2.0), levels[1]], 1))
        found = [(b(p).flatten(2), s(p).flatten(2)) for p, b, s in zip((p3, p4, p5), self.boxes, self.scores)]
        boxes = torch.cat([b for b, _ in found], 2).unflatten(1, (4, self.bins))
        distances = (boxes.softmax(2) * self.steps.view(1, 1, -1, 1)).sum(2)
        return distances, torch.cat([s for _, s in found], 2).sigmoid()


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        block = lambda a, b: nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(),
            nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(),
        )  # fmt: skip
        w = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList(block(a, b) for a, b in pairwise([3, *w]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in zip(w[:0:-1], w[-2::-1]))
        self.merge = nn.ModuleList(block(2 * b, b) for b in w[-2::-1])
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, merge, skip in zip(self.up, self.merge, kept[-2::-1]):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


class Fpn(nn.Module):
    """An SSD or FCOS backbone: ResNet-18 features, a feature pyramid, heads shared by all levels."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        body = resnet18()
        self.stem = nn.Sequential(body.conv1, body.bn1, body.relu, body.maxpool, body.layer1)
        self.layers = nn.ModuleList([body.layer2, body.layer3, body.layer4])
        self.side = nn.ModuleList(nn.Conv2d(c, 64, 1) for c in (128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))
        self.scores = nn.Sequential(
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 20, 3, padding=1)
        )
        self.boxes = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        levels = []
        for layer, side in zip(self.layers, self.side):
            x = layer(x)
            levels.append(side(x))
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], scale_factor=2.0, mode="nearest")
        levels = [smooth(level) for smooth, level in zip(self.smooth, levels)]
        return (
            torch.cat([self.scores(level).flatten(2) for level in levels], 2),
            torch.cat([self.boxes(level).relu().flatten(2) for level in levels], 2),
        )


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 128), nn.Linear(256, 20)
        self.rnn = kind(128, 128, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 64),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) - self.body(x.flip(3))).abs().sum(1)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    config.return_dict = False
    return BertModel(config, add_pooling_layer=False)


OWN: dict[str, Case] = {
    "yolo": Case(Yolo, images(320)),
    "unet": Case(UNet, images(128)),
    "resnet18_fpn": Case(Fpn, images(256)),
    "siamese": Case(Siamese, images(112)),
    "lstm_tagger": Case(lambda: Tagger(nn.LSTM), tokens(), cnn=False),
    "gru_tagger": Case(lambda: Tagger(nn.GRU), tokens(), cnn=False),
    "minilm": Case(_bert, tokens(128), cnn=False),
}
NAMES = [*TORCHVISION, *TIMM, *TIMM_OTHER, *SEGMENTATION, *OWN]


def case(name: str) -> Case:
    """Any name of NAMES, or of torchvision and timm."""
    import zoo_shim

    zoo_shim.install()
    if name in OWN:
        found = OWN[name]
    elif name in SEGMENTATION:
        found = Case(lambda: _Segmenter(name), images(256))
    elif name in TORCHVISION:
        found = Case(lambda: _torchvision(name), images(299 if name == "inception_v3" else 224))
    else:
        import timm

        found = Case(
            lambda: timm.create_model(name),
            images(256 if name == "mobilevit_s" else 224),
            name not in TIMM_OTHER,
        )
    return Case(
        lambda: settled(found.model(), _joined(found.data(4))).eval(), found.data, found.cnn, found.free_batch
    )


def _joined(batches: list[Any]) -> Any:
    return torch.cat(batches)


def _torchvision(name: str) -> nn.Module:
    import torchvision

    more: dict[str, Any] = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = (
        getattr(torchvision.models, name)(weights=None, init_weights=True, **more)
        if more
        else getattr(torchvision.models, name)(weights=None)
    )
    return model


class _Segmenter(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        from torchvision.models import segmentation

        self.net = getattr(segmentation, name)(weights=None, weights_backbone=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)["out"]
