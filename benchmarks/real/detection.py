"""YOLOX-nano and FastestDet (AP on coco_val79), and nudenet's YOLOv8n (AP against the float model's detections).

The images at even places calibrate, those at odd places judge.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import assets
import plain_session
from real import coco, packages
from real.feeds import Array, load_outputs
from real.network import Measure, Network, save_images
from real.place import Place
from real.static import fixed


class Detector(Network):
    metric = "AP"
    input: str

    def judged(self, rows: int) -> Array:
        return np.arange(1, rows, 2)

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        found = coco.decoded(self.detector(), outputs[0])
        return coco.average_precision(coco.tools().ann, found, coco.tools().CATS)

    def detector(self) -> Any:
        raise NotImplementedError

    def save(self, place: Place) -> None:
        x = coco.inputs_of(self.detector())
        save_images(place, self.input, x[::2], x, self.batch)


class YoloxNano(Detector):
    name, input = "YOLOX-nano", "images"

    def detector(self) -> Any:
        return coco.tools().yolox

    def prepare(self, place: Place) -> None:
        file = assets.ASSETS / "yolox_nano" / "yolox_nano_416.onnx"
        fixed(file, {self.input: [1, 3, 416, 416]}, place.file("float"))
        self.save(place)


class FastestDet(Detector):
    name, input = "FastestDet", "x"
    axes = {"x": {0: "batch"}}

    def detector(self) -> Any:
        return coco.tools().fastest

    def model(self, place: Place) -> torch.nn.Module:
        net = plain_session.load(assets.ASSETS / "fastestdet" / "model.py").FastestDet()
        file = assets.ASSETS / "fastestdet" / "fastestdet_coco.pth"
        net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return net.eval()

    def prepare(self, place: Place) -> None:
        import zoo_speed

        self.save(place)
        zoo_speed.write_float(self.model(place), [torch.zeros(1, 3, 352, 352)], place.file("float"), True)


class Nudenet(Detector):
    """Its 18 classes have no labels here: what the float model finds with a score of 0.25 is the truth."""

    name, input = "nudenet", "images"
    metric = "AP against float"
    SIZE, SURE, LEAST = 320, 0.25, 0.05

    def prepare(self, place: Place) -> None:
        file = packages.carried(place.work, "nudenet/320n.onnx")
        fixed(file, {"images": [1, 3, self.SIZE, self.SIZE]}, place.file("float"))
        x = np.stack([self.squared(picture) for picture in coco.pictures()])
        save_images(place, self.input, x[::2], x, self.batch)

    def squared(self, picture: Array) -> Array:
        """Padded to a square at the right and below, as the package does."""
        from PIL import Image

        size = max(picture.shape[:2])
        square = np.zeros((size, size, 3), np.uint8)
        square[: picture.shape[0], : picture.shape[1]] = picture
        small = Image.fromarray(square).resize((self.SIZE, self.SIZE), Image.Resampling.BILINEAR)
        return np.asarray(small).transpose(2, 0, 1).astype(np.float32) / 255

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        known = self.decoded(load_outputs(place.outputs("float", "here"))[0], self.SURE)
        classes = list(range(1, outputs[0].shape[1] - 3))
        images = [{"id": i + 1} for i in range(len(known))]
        objects = [
            {**row, "id": i + 1, "iscrowd": 0, "area": row["bbox"][2] * row["bbox"][3]}
            for i, row in enumerate(coco.rows_of(known, [image["id"] for image in images], classes))
        ]
        truth = {"images": images, "annotations": objects, "categories": [{"id": c} for c in classes]}
        return coco.average_precision(truth, self.decoded(outputs[0], self.LEAST), classes)

    def decoded(self, output: Array, least: float) -> list[coco.Found]:
        return [self.boxes(rows.T, least) for rows in output]

    def boxes(self, rows: Array, least: float) -> coco.Found:
        scores, classes = rows[:, 4:].max(1), rows[:, 4:].argmax(1)
        sure = scores > least
        middle, half = rows[sure, :2], rows[sure, 2:4] / 2
        corners = np.concatenate([middle - half, middle + half], 1)
        found: coco.Found = coco.tools().clsnms(corners, scores[sure], classes[sure], 0.45)
        return found
