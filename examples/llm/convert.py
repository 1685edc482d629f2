"""Quantize a causal language model: the original's convert.py, for any architecture of transformers.

  python convert.py MODEL --candidate-bits 2 3 4 --groupsize 128 --save model.pth.tar --text calibration.txt
  python convert.py MODEL --candidate-bits 4 --groupsize 128 --save out/ --text calibration.txt

--save FILE writes the original's checkpoint, a dict {"model", "hyper_parameters", "layers_bit"} for torch.load.
--save FOLDER writes safetensors in the format compressed-tensors, which llm.load reads. A name
without a suffix, or with "/" at its end, is a folder, and so is a folder that exists.
Both are read by inference.py, generate.py, finetune.py and finetune_pp.py.

The calibration text is a file, given by --text or by the environment variable SPARSEBIT_TEXT.
With --eval-text (or SPARSEBIT_EVAL_TEXT) the perplexity of the saved checkpoint is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs

from sparsebit import llm
from sparsebit.llm.legacy import WIDTHS, to_legacy, write_legacy


def sequences(tokens: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    """`count` random windows of `length` tokens."""
    length = min(length, len(tokens) - 1)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - length, (count,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


def options() -> inputs.Parser:
    parser = inputs.Parser("convert.py", __doc__)
    parser.add_argument(
        "model_name", help="folder with config.json, safetensors and a tokenizer, or a name on the Hub"
    )
    parser.add_argument(
        "--text", type=inputs.text_file, default=inputs.from_environment(inputs.TEXT), metavar="FILE",
        help=f"calibration text; if not given, the file that {inputs.TEXT} names",
    )  # fmt: skip
    parser.add_argument(
        "--eval-text", type=inputs.text_file, default=inputs.from_environment(inputs.EVAL_TEXT), metavar="FILE",
        help=f"text to measure the perplexity on; if not given, the file that {inputs.EVAL_TEXT} names",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random choice of calibration sequences"
    )
    parser.add_argument(
        "--nsamples", type=inputs.above_zero, default=128, help="number of calibration sequences"
    )
    parser.add_argument("--seqlen", type=inputs.above_zero, default=2048, help="their length in tokens")
    parser.add_argument(
        "--percdamp", type=float, default=0.01, help="damping of GPTQ, a share of the mean diagonal"
    )
    parser.add_argument(
        "--candidate-bits", type=int, nargs="+", required=True, choices=[2, 3, 4, 8], metavar="BITS",
        help="widths to choose from for each layer: 2, 3, 4, or 8 (in a folder)",
    )  # fmt: skip
    parser.add_argument(
        "--average-bits",
        type=float,
        help="mean width of all weights, with several candidates; if not given, the mean of the candidates",
    )
    parser.add_argument("--groupsize", type=int, default=-1, help="inputs that share a scale; -1: whole rows")
    parser.add_argument(
        "--save",
        metavar="FILE_OR_FOLDER",
        help="where to write the checkpoint; if not given, it is only measured",
    )
    return parser


def widths(parser: inputs.Parser, args: argparse.Namespace, is_file: bool) -> dict[str, Any]:
    """The arguments of llm.quantize for the chosen bits; refuses what would fail after hours."""
    candidates = sorted(set(args.candidate_bits))
    if is_file and candidates[-1] not in WIDTHS:
        parser.error(
            f"--save {args.save}: a file holds 2, 3 and 4 bits; save {candidates[-1]} bits in a folder"
        )
    average = sum(candidates) / len(candidates) if args.average_bits is None else args.average_bits
    if not candidates[0] <= average <= candidates[-1]:
        parser.error(f"--average-bits {average}: must be between {candidates[0]} and {candidates[-1]}")
    if len(candidates) == 1:
        return {"bits": candidates[0]}
    return {"candidate_bits": tuple(candidates), "average_bits": average}


def is_file(save: str | None) -> bool:
    """Whether --save means a file: what is there decides, else the name."""
    if save is None or Path(save).is_dir():
        return False
    return Path(save).is_file() or (bool(Path(save).suffix) and not save.endswith("/"))


def check_writable(parser: inputs.Parser, save: str) -> None:
    place = Path(save) if Path(save).is_dir() else Path(save).parent
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--save {save}: cannot be written ({error.strerror})")
    if not os.access(place, os.W_OK):
        parser.error(f"--save {save}: cannot be written (no permission)")


def main(arguments: list[str] | None = None) -> float | None:
    parser = options()
    args = parser.parse_args(arguments)
    if args.text is None:
        parser.error(
            f"no calibration text: add --text FILE, or set the environment variable {inputs.TEXT} to a file"
        )
    as_file = is_file(args.save)
    if args.groupsize < 1 and args.groupsize != -1:
        parser.error(f"--groupsize {args.groupsize}: must be above 0, or -1 for whole rows")
    bits = widths(parser, args, as_file)
    if args.save is not None:
        check_writable(parser, args.save)
    with parser.refusing():
        return convert(args, as_file, bits)


def convert(args: argparse.Namespace, as_file: bool, bits: dict[str, Any]) -> float | None:
    model_dir = inputs.model_folder(args.model_name)
    tokenizer = inputs.tokenizer_of(model_dir)
    length = inputs.window(model_dir, args.seqlen)
    tokens = inputs.tokens_of(tokenizer, args.text)
    eval_tokens = None if args.eval_text is None else inputs.tokens_of(tokenizer, args.eval_text)
    batches = sequences(tokens, args.nsamples, length, args.seed).split(1)
    beside = Path(args.save).parent if as_file else None
    with tempfile.TemporaryDirectory(dir=beside, prefix=".convert-") as scratch:
        folder = Path(scratch) if as_file or args.save is None else Path(args.save)
        report = llm.quantize(
            model_dir,
            batches,
            save=folder,
            group_size=args.groupsize,
            symmetric=False,
            damping=args.percdamp,
            force=True,  # the scripts of this folder read it, whether or not other programs can
            **bits,
        )
        if as_file:
            write_legacy(to_legacy(llm.load(folder)), args.save)
            report = replace(report, folder=Path(args.save))
        print(report)
        if eval_tokens is None:
            print("perplexity: not measured; --eval-text FILE says on which text")
            return None
        model = inputs.load_checkpoint(Path(args.save) if as_file else folder, model_dir)
    figure = llm.perplexity(model, eval_tokens, length)
    print(f"perplexity {figure:.3f}")
    return figure


if __name__ == "__main__":
    main()
