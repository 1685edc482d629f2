"""Quantize a causal LM: the original's convert.py, on any architecture of transformers, on CPU or GPU.

    python convert.py MODEL_DIR --text calibration.txt --candidate-bits 4 --groupsize 128 --save out/
    python convert.py MODEL_DIR --text calibration.txt --candidate-bits 2 3 4 --average-bits 3 --save out/
    python convert.py MODEL_DIR --text calibration.txt --candidate-bits 4 --save old.pt      # the old dict

The perplexity it prints is that of the saved checkpoint. --save FILE.pt writes the original's format, a folder is
written in compressed-tensors (vLLM, transformers).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from sparsebit import llm
from sparsebit.llm.legacy import to_legacy


def sequences(tokenizer: Any, text: Path, count: int, length: int, seed: int) -> torch.Tensor:
    """`count` random windows of `length` tokens."""
    tokens = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    length = min(length, len(tokens) - 1)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - length, (count,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


def main(arguments: list[str] | None = None) -> float | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model_name", type=Path, help="folder with config.json, safetensors and a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--eval-text", type=Path, help="text to measure the perplexity on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nsamples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--percdamp", type=float, default=0.01)
    parser.add_argument("--candidate-bits", type=int, nargs="+", required=True)
    parser.add_argument("--average-bits", type=float, help="with several candidates; their mean if not said")
    parser.add_argument("--groupsize", type=int, default=-1)
    parser.add_argument("--save", type=Path, help="a folder, or FILE.pt for the original's dict")
    args = parser.parse_args(arguments)

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    bits: dict[str, Any] = {"bits": args.candidate_bits[0]}
    if len(args.candidate_bits) > 1:
        average = args.average_bits or sum(args.candidate_bits) / len(args.candidate_bits)
        bits = {"candidate_bits": tuple(args.candidate_bits), "average_bits": average}
    old = args.save is not None and args.save.suffix in (".pt", ".pth", ".bin")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if old or args.save is None else args.save
        batches = sequences(tokenizer, args.text, args.nsamples, args.seqlen, args.seed).split(1)
        report = llm.quantize(
            args.model_name, batches, save=folder, group_size=args.groupsize, symmetric=False,
            damping=args.percdamp, **bits,
        )  # fmt: skip
        print(report)
        model = llm.load(folder)
    if old:
        torch.save(to_legacy(model), args.save)
    if args.eval_text is None:
        return None
    text = torch.tensor(tokenizer(args.eval_text.read_text(encoding="utf-8"))["input_ids"])
    figure = llm.perplexity(model, text, args.seqlen)
    print(f"perplexity {figure:.3f}")
    return figure


if __name__ == "__main__":
    main()
