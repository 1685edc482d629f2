"""Generate text with a quantized checkpoint: the original's inference.py.

python inference.py MODEL_DIR out/ --prompt "Once upon a time"       # a folder that convert.py wrote
python inference.py MODEL_DIR old.pt --prompt "Once upon a time"     # the original's dict, pack32 or pack8
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from sparsebit import llm
from sparsebit.llm.legacy import from_legacy


def load(model_name: Path, checkpoint: Path) -> Any:
    if checkpoint.is_dir():
        return llm.load(checkpoint)
    from transformers import AutoModelForCausalLM

    # the original saved its argparse.Namespace, hence the allowance
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    return from_legacy(state, AutoModelForCausalLM.from_pretrained(model_name))


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "model_name", type=Path, help="folder of the float model, for its tokenizer and config"
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--groupsize", type=int, help="not needed: the checkpoint knows it")
    parser.add_argument("--single_device_mode", action="store_true", help="always so; kept for old scripts")
    args = parser.parse_args(arguments)

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    model = load(args.model_name, args.checkpoint)
    ids = tokenizer(args.prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=args.max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(out[0])
    print(text)
    return text


if __name__ == "__main__":
    main()
