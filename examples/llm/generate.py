"""Answer an instruction with a quantized model and its adapters: the original's generate.py.

  python generate.py out/ --lora_weights adapter/ --instruction "Name three colours."
  python generate.py model.pth.tar --model_name MODEL --lora_weights adapter/ --instruction "Add." --input "1, 2"
  python generate.py out/ --prompt "Once upon a time"

The model is a folder or a file that convert.py wrote, the adapters were written by finetune.py or finetune_pp.py.
--instruction is put into the text that training uses (instructions.py); --prompt is continued unchanged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs
import instructions

from sparsebit.errors import ConfigError


def check_adapter(folder: Path) -> None:
    inputs.check_packages("peft", extra="qlora")
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder}: has no adapter_config.json; name a folder that finetune.py wrote")


def with_adapter(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: the adapters do not fit this model: {error}") from None


def options() -> inputs.Parser:
    parser = inputs.Parser("generate.py", __doc__)
    parser.add_argument("checkpoint", type=Path, help="folder or file that convert.py wrote")
    parser.add_argument("--model_name", help="for a checkpoint in one file: the model it was made from")
    parser.add_argument(
        "--lora_weights", type=Path, help="folder of the adapters; if not given, there are none"
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--instruction", help="what the model should do")
    asked.add_argument("--prompt", help="text to continue")
    parser.add_argument("--input", default="", help="what the instruction is about")
    parser.add_argument("--max_new_tokens", type=inputs.above_zero, default=128, help="longest answer")
    parser.add_argument(
        "--num_beams", type=inputs.above_zero, default=1, help="answers that are followed in parallel"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0: always take the most likely token; above 0: draw at random",
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=0.75,
        help="draw from the most likely tokens with this total probability",
    )
    parser.add_argument(
        "--top_k", type=inputs.above_zero, default=40, help="draw from so many of the most likely tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of everything that is not packed; if not given, the stored one",
    )
    return parser


def main(arguments: list[str] | None = None) -> str:
    """The answer, without the prompt."""
    parser = options()
    args = parser.parse_args(arguments)
    if args.prompt is not None and args.input:
        parser.error("--input belongs to --instruction; leave it out with --prompt")
    with parser.refusing():
        return generate(args)


def generate(args: argparse.Namespace) -> str:
    described = inputs.described_by(args.checkpoint, args.model_name)
    if args.lora_weights is not None:
        check_adapter(args.lora_weights)
    tokenizer = inputs.tokenizer_of(described)
    model = inputs.load_checkpoint(
        args.checkpoint, described, getattr(torch, args.dtype) if args.dtype else None
    )
    if args.lora_weights is not None:
        model = with_adapter(model, args.lora_weights)
    model = inputs.to_device(model.eval())
    text = args.prompt if args.instruction is None else instructions.prompt(args.instruction, args.input)
    prompt = inputs.encode(tokenizer, text, model)
    drawn = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    how = drawn if args.temperature > 0 else {"do_sample": False}
    torch.manual_seed(args.seed)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=args.max_new_tokens, num_beams=args.num_beams, **how)
    answer: str = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(answer)
    return answer


if __name__ == "__main__":
    main()
