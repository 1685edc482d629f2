"""llmcompressor's GPTQ on a folder of float weights; `benchmarks/llm.py --peer` runs this in llmcompressor's own venv.

    PYTHON benchmarks/llm_peer.py FOLDER TOKENS.npy OUT --bits 4 --group 64 [--asymmetric]

TOKENS is (sequences, length). Reading, quantizing and saving are timed, imports are not; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

import numpy as np
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def recipe(bits: int, group: int, symmetric: bool) -> GPTQModifier:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return GPTQModifier(config_groups=groups, ignore=["lm_head"])  # all else as it comes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("tokens")
    parser.add_argument("out")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--asymmetric", action="store_true")
    args = parser.parse_args()
    tokens = torch.from_numpy(np.load(args.tokens))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    wall, cpu = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    loader = DataLoader(data, batch_size=args.batch)
    oneshot(
        model=model,
        dataset=loader,
        recipe=recipe(args.bits, args.group, not args.asymmetric),
        num_calibration_samples=len(data),
    )
    model.save_pretrained(args.out, save_compressed=True)
    spent = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    print(json.dumps({**spent, "version": version("llmcompressor")}), flush=True)


if __name__ == "__main__":
    main()
