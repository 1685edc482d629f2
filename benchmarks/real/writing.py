"""Words and pages that PIL draws, with their truth. The words come from STS-B, the backgrounds from COCO."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

import minilm
from real import packages
from real.feeds import Array

FONTS = packages.CARRIERS["matplotlib==3.11.2"]
Colour = tuple[int, int, int]


def fonts(work: Path) -> list[Path]:
    return [packages.carried(work, path) for path in FONTS]


def words() -> list[str]:
    """Words of STS-B's test sentences, each once, from 3 to 12 letters."""
    found = re.findall(r"\b[A-Za-z]{3,12}\b", " ".join(minilm.pairs("test")[0]))
    return list(dict.fromkeys(found))


def phrases(chance: np.random.Generator, longest: int) -> Iterator[str]:
    """One to three words, now and then with a number."""
    known = words()
    while True:
        parts = [str(word) for word in chance.choice(known, chance.integers(1, 4))]
        if chance.random() < 0.3:
            parts.append(str(chance.integers(10, 100_000)))
        text = " ".join(parts)
        if len(text) <= longest:
            yield text


def colours(chance: np.random.Generator, contrast: float) -> tuple[Colour, Colour]:
    """Of the ground and of the ink; their brightness differs by `contrast` at least."""
    while True:
        ground, ink = chance.integers(0, 256, (2, 3))
        if abs(ground.mean() - ink.mean()) >= contrast:
            return (int(ground[0]), int(ground[1]), int(ground[2])), (int(ink[0]), int(ink[1]), int(ink[2]))


def line(text: str, font: Path, chance: np.random.Generator) -> Image.Image:
    """A text line as a crop of a photograph: turned a little, blurred, with noise."""
    ground, ink = colours(chance, 35)
    drawn = ImageFont.truetype(str(font), int(chance.integers(22, 44)))
    left, top, right, bottom = drawn.getbbox(text)
    margin = chance.integers(2, 9, 4)
    size = (int(right - left + margin[0] + margin[1]), int(bottom - top + margin[2] + margin[3]))
    picture = Image.new("RGB", size, ground)
    ImageDraw.Draw(picture).text((margin[0] - left, margin[2] - top), text, ink, drawn)
    picture = picture.rotate(chance.uniform(-2, 2), Image.Resampling.BILINEAR, fillcolor=ground)
    picture = picture.filter(ImageFilter.GaussianBlur(chance.uniform(0, 2.2)))
    return noisy(picture, chance, chance.uniform(0, 40))


def noisy(picture: Image.Image, chance: np.random.Generator, strength: float) -> Image.Image:
    pixels = np.asarray(picture).astype(np.float32)
    pixels = pixels + chance.normal(0, strength, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def page(background: Array, work: Path, chance: np.random.Generator) -> tuple[Image.Image, list[list[int]]]:
    """A photograph with some lines of text on it that do not overlap, and their boxes (x1 y1 x2 y2)."""
    size = 640
    picture = Image.fromarray(background).convert("RGB").resize((size, size))
    draw, boxes = ImageDraw.Draw(picture), []
    known, texts = fonts(work), phrases(chance, 24)
    for _ in range(40):
        text = next(texts)
        drawn = ImageFont.truetype(str(known[chance.integers(len(known))]), int(chance.integers(14, 40)))
        x, y = (int(v) for v in chance.integers(5, size - 60, 2))
        box = [int(v) for v in drawn.getbbox(text)]
        box = [box[0] + x, box[1] + y, box[2] + x, box[3] + y]
        if box[2] > size - 5 or box[3] > size - 5 or any(near(box, other) for other in boxes):
            continue
        ground, ink = colours(chance, 80)
        if chance.random() < 0.5:  # on a plate
            draw.rectangle([box[0] - 4, box[1] - 4, box[2] + 4, box[3] + 4], ground)
        else:
            below = np.asarray(picture)[box[1] : box[3], box[0] : box[2]].mean()
            ink = (20, 20, 20) if below > 128 else (235, 235, 235)
        draw.text((x, y), text, ink, drawn)
        boxes.append(box)
    return picture, boxes


def near(a: list[int], b: list[int], gap: int = 14) -> bool:
    return a[0] < b[2] + gap and b[0] < a[2] + gap and a[1] < b[3] + gap and b[1] < a[3] + gap


LETTERS = "0123456789abdefghjmnqrtyABDEFGHJMNQRTY"  # those whose two cases look different


def captcha(work: Path, chance: np.random.Generator) -> tuple[Image.Image, str]:
    """Four or five letters, each turned and coloured, on dots and lines."""
    text = "".join(chance.choice(list(LETTERS), chance.integers(4, 6)))
    picture = Image.new("RGB", (160, 60), colour(chance, 190, 256))
    draw = ImageDraw.Draw(picture)
    known = fonts(work)
    x = int(chance.integers(4, 14))
    for letter in text:
        font = ImageFont.truetype(str(known[chance.integers(len(known))]), int(chance.integers(30, 42)))
        stamp = Image.new("L", (48, 56), 0)
        ImageDraw.Draw(stamp).text((8, 4), letter, 255, font)
        stamp = stamp.rotate(chance.uniform(-18, 18), Image.Resampling.BILINEAR)
        picture.paste(
            Image.new("RGB", stamp.size, colour(chance, 0, 130)), (x - 6, int(chance.integers(0, 6))), stamp
        )
        x += int(chance.integers(25, 30))
    for _ in range(chance.integers(1, 4)):
        ends = [(int(a), int(b)) for a, b in zip(chance.integers(0, 160, 2), chance.integers(0, 60, 2))]
        draw.line(ends, colour(chance, 60, 200), 1)
    for _ in range(60):
        draw.point((int(chance.integers(160)), int(chance.integers(60))), colour(chance, 0, 220))
    return picture, text


def colour(chance: np.random.Generator, low: int, high: int) -> Any:
    return tuple(int(v) for v in chance.integers(low, high, 3))
