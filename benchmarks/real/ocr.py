"""PP-OCR's detector and recogniser, ddddocr's CNN + LSTM, on text that PIL draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from real import coco, packages, writing
from real.feeds import Array, load_outputs
from real.network import Measure, Network, save_images
from real.place import Place
from real.static import fixed

SEED = 20_000


def exact(right: list[bool]) -> Measure:
    kept = np.array(right)
    return lambda rows: 100 * float(kept[rows].mean())


def collapsed(codes: Array) -> list[int]:
    """CTC: equal neighbours are one, 0 is the blank."""
    changes = np.concatenate([[True], codes[1:] != codes[:-1]])
    return [int(code) for code in codes[changes] if code]


class Reader(Network):
    """PP-OCR's recogniser: 48 x 320, exact match of the line without its spaces."""

    metric = "exact match %"
    attention = True
    CALIBRATE, JUDGE, WIDTH = 64, 240, 320

    def __init__(self, name: str, path: str):
        self.name, self.path = name, path

    def prepare(self, place: Place) -> None:
        fixed(packages.carried(place.work, self.path), {"x": [1, 3, 48, self.WIDTH]}, place.file("float"))
        chance = np.random.default_rng(SEED)
        texts, fonts = writing.phrases(chance, 22), writing.fonts(place.work)
        asked = [next(texts) for _ in range(self.CALIBRATE + self.JUDGE)]
        x = np.stack(
            [self.input(writing.line(t, fonts[i % len(fonts)], chance)) for i, t in enumerate(asked)]
        )
        save_images(place, "x", x[: self.CALIBRATE], x[self.CALIBRATE :], self.batch)
        place.truth.write_text(json.dumps(asked[self.CALIBRATE :]))

    def input(self, picture: Any) -> Array:
        """Blue first, 48 high, padded with the mean at the right."""
        width = min(self.WIDTH, round(picture.width * 48 / picture.height))
        pixels = np.asarray(picture.resize((width, 48)))[:, :, ::-1].transpose(2, 0, 1).astype(np.float32)
        padded = np.zeros((3, 48, self.WIDTH), np.float32)
        padded[:, :, :width] = pixels / 127.5 - 1
        return padded

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        letters = self.letters(packages.carried(place.work, self.path))
        texts = ["".join(letters[code] for code in collapsed(row)) for row in outputs[0].argmax(2)]
        truth = json.loads(place.truth.read_text())
        return exact([a.replace(" ", "") == b.replace(" ", "") for a, b in zip(texts, truth)])

    def letters(self, file: Path) -> list[str]:
        import onnx

        kept = {entry.key: entry.value for entry in onnx.load(file, load_external_data=False).metadata_props}
        return ["", *kept["character"].split("\n"), " "]


class Finder(Network):
    """PP-OCR's detector: 640 x 640 pages; the harmonic mean of recall and precision of boxes, at an IoU of 0.5."""

    metric = "hmean"
    THRESHOLD, SURE, UNCLIP = 0.3, 0.5, 1.6

    def __init__(self, name: str, path: str):
        self.name, self.path = name, path

    def prepare(self, place: Place) -> None:
        fixed(packages.carried(place.work, self.path), {"x": [1, 3, 640, 640]}, place.file("float"))
        chance = np.random.default_rng(SEED + 1)
        pages = [writing.page(picture, place.work, chance) for picture in coco.pictures()]
        x = np.stack([np.asarray(picture)[:, :, ::-1].transpose(2, 0, 1) for picture, _ in pages])
        x = x.astype(np.float32) / 127.5 - 1
        save_images(place, "x", x[::2], x[1::2], self.batch)
        place.truth.write_text(json.dumps([boxes for _, boxes in pages[1::2]]))

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        truth = json.loads(place.truth.read_text())
        counts = np.array([counted(self.boxes(row[0]), known) for row, known in zip(outputs[0], truth)])

        def measure(rows: Array) -> float:
            hits, found, known = counts[rows].sum(0)
            return 100 * 2 * hits / max(1, found + known)

        return measure

    def boxes(self, probability: Array) -> Array:
        """Connected pieces of the map, widened as the text kernels were shrunk."""
        from scipy import ndimage

        labels, _ = ndimage.label(probability > self.THRESHOLD)
        found = []
        for i, (rows, columns) in enumerate(ndimage.find_objects(labels)):
            height, width = rows.stop - rows.start, columns.stop - columns.start
            piece = probability[rows, columns][labels[rows, columns] == i + 1]
            if min(height, width) < 3 or piece.mean() < self.SURE:
                continue
            more = self.UNCLIP * height * width / (2 * (height + width))
            found.append([columns.start - more, rows.start - more, columns.stop + more, rows.stop + more])
        return np.array(found, float).reshape(-1, 4)

    def also(self, place: Place, outputs: list[Array]) -> dict[str, float]:
        reference = load_outputs(place.outputs("float", "here"))[0] > self.THRESHOLD
        found = outputs[0] > self.THRESHOLD
        return {"IoU with float": float((reference & found).sum() / max(1, (reference | found).sum()))}


def counted(found: Array, truth: list[list[int]]) -> tuple[int, int, int]:
    """Boxes that are right, found and there; each known box is found once."""
    known = np.array(truth, float).reshape(-1, 4)
    overlaps = overlap(found, known)
    hits = 0
    while overlaps.size and overlaps.max() >= 0.5:
        i, j = np.unravel_index(overlaps.argmax(), overlaps.shape)
        overlaps[i], overlaps[:, j] = 0, 0
        hits += 1
    return hits, len(found), len(known)


def overlap(a: Array, b: Array) -> Array:
    low, high = np.maximum(a[:, None, :2], b[:, :2]), np.minimum(a[:, None, 2:], b[:, 2:])
    both = (high - low).clip(0).prod(2)
    return both / ((a[:, 2:] - a[:, :2]).prod(1)[:, None] + (b[:, 2:] - b[:, :2]).prod(1) - both + 1e-9)


class Captcha(Network):
    """ddddocr's newer network (its `beta`): 64 x 170, exact match; upper and lower case count as one."""

    name, metric = "ddddocr", "exact match %"
    CALIBRATE, JUDGE, WIDTH = 64, 240, 170

    def prepare(self, place: Place) -> None:
        source = packages.carried(place.work, "ddddocr/common.onnx")
        fixed(source, {"input1": [1, 1, 64, self.WIDTH]}, place.file("float"))
        chance = np.random.default_rng(SEED + 2)
        drawn = [writing.captcha(place.work, chance) for _ in range(self.CALIBRATE + self.JUDGE)]
        x = np.stack([self.input(picture) for picture, _ in drawn])
        save_images(place, "input1", x[: self.CALIBRATE], x[self.CALIBRATE :], self.batch)
        place.truth.write_text(json.dumps([text for _, text in drawn[self.CALIBRATE :]]))

    def input(self, picture: Any) -> Array:
        grey = picture.resize((self.WIDTH, 64)).convert("L")
        return np.asarray(grey).astype(np.float32)[None] / 255

    def rows(self, outputs: list[Array], samples: int) -> list[Array]:
        """The file puts the steps first: (steps, 1, letters) for each image."""
        return [part.reshape(samples, -1, part.shape[-1]) for part in outputs]

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        letters = self.letters(packages.carried(place.work, "ddddocr/charsets.py"))
        texts = ["".join(letters[code] for code in collapsed(row)) for row in outputs[0].argmax(2)]
        truth = json.loads(place.truth.read_text())
        return exact([a.lower() == b.lower() for a, b in zip(texts, truth)])

    def letters(self, file: Path) -> list[str]:
        import plain_session

        found: list[str] = plain_session.load(file).CHARSET_BETA
        return found


V4, V6 = "rapidocr_onnxruntime/models/ch_PP-OCRv4_{}_infer.onnx", "rapidocr/models/PP-OCRv6_{}_small.onnx"
READERS = [
    Finder("PP-OCRv4 det", V4.format("det")),
    Reader("PP-OCRv4 rec", V4.format("rec")),
    Finder("PP-OCRv6 det", V6.format("det")),
    Reader("PP-OCRv6 rec", V6.format("rec")),
]
