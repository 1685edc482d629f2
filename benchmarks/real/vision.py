"""MobileNetV2 on ImageNet, ResNet-20 and ResNet-44 on CIFAR-10: top-1."""

from __future__ import annotations

import json

import numpy as np
import torch

import assets
from real.feeds import Array
from real.network import Measure, Network, save_images
from real.place import Place


class Classifier(Network):
    metric = "top-1 %"
    batch = 25
    axes = {"x": {0: "batch"}}

    def data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Images to calibrate on, images to judge, and the labels of those."""
        raise NotImplementedError

    def prepare(self, place: Place) -> None:
        import zoo_speed

        known, x, y = self.data()
        save_images(place, "x", known.numpy(), x.numpy(), self.batch)
        place.truth.write_text(json.dumps(y.tolist()))
        zoo_speed.write_float(self.model(place), [x[:1]], place.file("float"), True)

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        right = outputs[0].argmax(1) == np.array(json.loads(place.truth.read_text()))
        return lambda rows: 100 * float(right[rows].mean())


class MobileNetV2(Classifier):
    """One image in four calibrates."""

    name = "MobileNetV2"

    def data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return assets.split_imagenet()

    def model(self, place: Place) -> torch.nn.Module:
        return assets.mobilenet_v2()


class CifarResNet(Classifier):
    """256 images of the training set calibrate, 5,000 of the test set judge."""

    def __init__(self, depth: int):
        self.depth, self.name = depth, f"ResNet-{depth}"

    def data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return assets.cifar10("train20k", 256)[0], *assets.cifar10("test", 5000)

    def model(self, place: Place) -> torch.nn.Module:
        return assets.cifar_resnet(self.depth)
