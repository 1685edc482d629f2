"""COCO's average precision on the 79 images of the assets, quick enough to be resampled."""

from __future__ import annotations

import contextlib
import io
from functools import cache
from typing import Any

import numpy as np

import assets
import plain_session
from real.feeds import Array
from real.network import Measure

RECALLS = np.linspace(0, 1, 101)
Found = tuple[Array, Array, Array]  # boxes (x1 y1 x2 y2), scores, classes


@cache
def tools() -> Any:
    """detect_eval.py of the assets: images, preprocessing and decoders."""
    return plain_session.load(assets.ASSETS / "coco_val79" / "detect_eval.py")


def pictures() -> list[Array]:
    module = tools()
    return [
        np.asarray(module.Image.open(f"{module.R}val2017/{entry['file_name']}").convert("RGB"))
        for entry in module.IMGS
    ]


class Seen(Exception):
    """The input of a detector has been kept."""


def inputs_of(detector: Any) -> Array:
    """What `detector` (of detect_eval.py) feeds its network with, for each image."""
    kept: list[Array] = []

    def keep(x: Array) -> Array:
        kept.append(x)
        raise Seen

    for picture in pictures():
        with contextlib.suppress(Seen):
            detector(keep)(picture)
    return np.concatenate(kept).astype(np.float32)


def decoded(detector: Any, output: Array) -> list[Found]:
    answers = iter(output)
    found = detector(lambda x: next(answers)[None])
    return [found(picture) for picture in pictures()]


def average_precision(truth: dict[str, Any], found: list[Found], categories: list[int]) -> Measure:
    """AP in per cent, as a function of the images (by their place in `truth`) that count."""
    if not any(len(scores) for _, scores, _ in found):  # pycocotools takes no empty answer
        return lambda rows: 0.0
    matches = matched(truth, found, categories)

    def measure(rows: Array) -> float:
        values = [class_precision([of_class[row] for row in rows]) for of_class in matches]
        return 100 * float(np.mean([value for value in values if value is not None]))

    return measure


def matched(truth: dict[str, Any], found: list[Found], categories: list[int]) -> list[list[Any]]:
    """pycocotools' matches: for each class, for each image."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    ids = [image["id"] for image in truth["images"]]
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = truth
        known.createIndex()
        judge = COCOeval(known, known.loadRes(rows_of(found, ids, categories)), "bbox")
        judge.params.areaRng, judge.params.areaRngLbl = judge.params.areaRng[:1], ["all"]
        judge.evaluate()
    order = {image: i for i, image in enumerate(judge.params.imgIds)}
    count = len(ids)
    return [
        [judge.evalImgs[k * count + order[image]] for image in ids] for k in range(len(judge.params.catIds))
    ]


def rows_of(found: list[Found], ids: list[int], categories: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for image, (boxes, scores, classes) in zip(ids, found):
        for (x1, y1, x2, y2), value, label in zip(boxes, scores, classes):
            box = [float(x1), float(y1), float(x2 - x1), float(y2 - y1)]
            row = {"image_id": image, "category_id": categories[int(label)], "bbox": box}
            rows.append({**row, "score": float(value)})
    return rows


def class_precision(images: list[Any]) -> float | None:
    """Mean over the ten thresholds of the interpolated precision; None where there is no object of the class."""
    images = [image for image in images if image is not None]
    objects = sum(int((np.asarray(image["gtIgnore"]) == 0).sum()) for image in images)
    if not objects:
        return None
    scores = np.concatenate([image["dtScores"] for image in images])
    if not len(scores):
        return 0.0
    order = np.argsort(-scores, kind="mergesort")
    hit = np.concatenate([image["dtMatches"] for image in images], 1)[:, order] > 0
    ignored = np.concatenate([image["dtIgnore"] for image in images], 1)[:, order].astype(bool)
    right = np.cumsum(hit & ~ignored, 1, dtype=float)
    wrong = np.cumsum(~hit & ~ignored, 1, dtype=float)
    recall, precision = right / objects, right / np.maximum(right + wrong, 1e-16)
    precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
    total = 0.0
    for of_recall, of_precision in zip(recall, precision):
        places = np.searchsorted(of_recall, RECALLS, side="left")
        padded = np.append(of_precision, 0.0)
        total += padded[np.minimum(places, len(of_precision))].mean()
    return total / len(recall)
