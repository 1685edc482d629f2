"""Run a quantized checkpoint: the original's inference.py.

  python inference.py MODEL model.pth.tar --prompt "Once upon a time"     # a file of convert.py, pack32 or pack8
  python inference.py MODEL out/ --eval-text test.txt                     # a folder of convert.py

It continues the prompt with the most likely tokens. With --eval-text (or SPARSEBIT_EVAL_TEXT) it also prints the
perplexity, which is the one that convert.py printed for the same text and --seqlen.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs

from sparsebit import llm
from sparsebit.errors import ConfigError


def check_groups(model: Any, asked: int) -> None:
    sizes = {m.group or -1 for m in model.modules() if isinstance(m, llm.QuantLinear)}
    if sizes != {asked}:
        found = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(f"--groupsize {asked}: the checkpoint has {found}; leave the option out")


def main(arguments: list[str] | None = None) -> str:
    parser = inputs.Parser("inference.py", __doc__)
    parser.add_argument(
        "model_name", help="folder of the float model, or its name on the Hub: config and tokenizer"
    )
    parser.add_argument("checkpoint", type=Path, help="file or folder that convert.py wrote")
    parser.add_argument("--prompt", default="Once upon a time", help="text to continue")
    parser.add_argument("--max-new-tokens", type=inputs.above_zero, default=64, help="length of the answer")
    parser.add_argument(
        "--eval-text", type=inputs.text_file, default=inputs.from_environment(inputs.EVAL_TEXT), metavar="FILE",
        help=f"text to measure the perplexity on; if not given, the file that {inputs.EVAL_TEXT} names",
    )  # fmt: skip
    parser.add_argument(
        "--seqlen", type=inputs.above_zero, default=2048, help="length of its pieces in tokens"
    )
    parser.add_argument(
        "--groupsize", type=int, help="not needed, the checkpoint says it; another one is refused"
    )
    parser.add_argument("--single_device_mode", action="store_true", help="always so; for old commands")
    args = parser.parse_args(arguments)
    with parser.refusing():
        return infer(args)


def infer(args: argparse.Namespace) -> str:
    inputs.check_checkpoint(args.checkpoint)
    folder = inputs.model_folder(args.model_name)
    tokenizer = inputs.tokenizer_of(folder)
    model = inputs.to_device(inputs.load_checkpoint(args.checkpoint, folder))
    if args.groupsize is not None:
        check_groups(model, args.groupsize)
    prompt = inputs.encode(tokenizer, args.prompt, model)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=args.max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(out[0])
    print(text)
    if args.eval_text is not None:
        figure = llm.perplexity(
            model, inputs.tokens_of(tokenizer, args.eval_text), inputs.window(folder, args.seqlen)
        )
        print(f"perplexity {figure:.3f}")
    return text


if __name__ == "__main__":
    main()
