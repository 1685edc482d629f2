"""What every example does: read the command line, train, measure, print a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VISION = "timm:NAME or torchvision:NAME; default: a small network of this example"


def parser(
    doc: str | None, script: str, samples: int, epochs: int, config: str = "qconfig.yaml", model: str = VISION
) -> argparse.ArgumentParser:
    """The options of all examples; `config` is the file beside the script, `model` the help of --model, if any."""
    beside = str(Path(script).with_name(config))
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("config", nargs="?", default=beside, help=f"default: {config} beside this script")
    found.add_argument("--data", type=Path, help="the real data set, see above; default: generated data")
    found.add_argument("--samples", type=int, default=samples, help=f"to train with (default {samples})")
    found.add_argument("--epochs", type=int, default=epochs, help=f"of the float model (default {epochs})")
    if model:
        found.add_argument("--model", help=model)
    found.add_argument("--weights", type=Path, help="a state_dict for it; then --epochs 0 is what you want")
    found.add_argument(
        "--onnx", type=Path, help="write the result to this file (pip install 'sparsebit[onnx]')"
    )
    return found


def with_training(found: argparse.ArgumentParser, epochs: int, what: str) -> argparse.ArgumentParser:
    """--more-epochs: the training that follows on that of the float model."""
    found.add_argument("--more-epochs", type=int, default=epochs, help=f"{what} (default {epochs})")
    return found


def folder(name: str) -> str:
    """--model of the text examples: a folder, never a download."""
    if not Path(name).is_dir():
        raise SystemExit(
            f"--model {name}: no such folder; nothing is downloaded, save_pretrained() writes one"
        )
    return name


def classify(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def fit(
    model: nn.Module,
    data: Sequence[Tensor],
    epochs: int,
    lr: float = 5e-3,
    loss: Callable[..., Tensor] = classify,
    groups: Iterable[Any] | None = None,
    batch: int = 32,
) -> None:
    """`loss(model, *batch)` goes down, over tensors that all have the samples first; `groups` as for an optimizer."""
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=lr, weight_decay=1e-4)
    steps = max(epochs * -(-len(data[0]) // batch), 1)
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(data[0])).split(batch):
            optimizer.zero_grad()
            loss(model, *(part[index] for part in data)).backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def outputs(model: Any, *inputs: Tensor, batch: int = 64) -> Tensor:
    return torch.cat([model(*part) for part in zip(*(x.split(batch) for x in inputs))])


def percent(scores: Tensor, y: Tensor) -> float:
    return (scores.argmax(1) == y).float().mean().item() * 100


def accuracy(model: Any, x: Tensor, y: Tensor) -> float:
    return percent(outputs(model, x), y)


def sqnr(exact: Tensor, other: Tensor) -> float:
    """Signal to quantization noise in dB: sharper than accuracy, and it needs no labels."""
    return (10 * torch.log10(exact.square().sum() / (exact - other).square().sum())).item()


def compare(model: Any, qmodel: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    exact, got = outputs(model, x), outputs(qmodel, x)
    return {"float %": percent(exact, y), "quantized %": percent(got, y), "quantized dB": sqnr(exact, got)}


def export(qmodel: Any, example: Any, file: Path | None) -> None:
    """Only where --onnx was given: write the file, run it, compare, and say how that went."""
    if file is not None:
        print(qmodel.export_onnx(example, str(file)))


def show(results: dict[str, float]) -> dict[str, float]:
    for name, value in results.items():
        print(f"{name:28}{value:9.2f}")
    return results
