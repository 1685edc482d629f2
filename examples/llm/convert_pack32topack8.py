"""Checkpoint files of convert.py: int32 words into rows of int8, for the original's training kernels, and back.

  python convert_pack32topack8.py model.pth.tar model-pack8.pth.tar
  python convert_pack32topack8.py model-pack8.pth.tar model.pth.tar --to32

The scripts here read both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from inputs import Parser

from sparsebit.errors import ConfigError
from sparsebit.llm.legacy import read_legacy, to_bytes, to_words, write_legacy


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("convert_pack32topack8.py", __doc__)
    parser.add_argument("checkpoint", help="file to read")
    parser.add_argument("output", help="file to write")
    parser.add_argument("--to32", action="store_true", help="the other direction: int8 into int32")
    args = parser.parse_args(arguments)
    if not Path(args.output).resolve().parent.is_dir():
        parser.error(f"{args.output}: there is no such folder; make it first")
    with parser.refusing():
        repack(args.checkpoint, args.output, args.to32)


def repack(path: str, output: str, to32: bool) -> None:
    checkpoint = read_legacy(path)
    kind, change = (torch.int8, to_words) if to32 else (torch.int32, to_bytes)
    tensors = checkpoint["model"]
    packed = [key for key in tensors if key.endswith(".qweight")]
    wrong = [key for key in packed if tensors[key].dtype != kind]
    if wrong or not packed:
        raise ConfigError(f"{path}: {wrong[0] if wrong else 'every layer'} is not packed as {kind}")
    for key in packed:
        tensors[key] = change(tensors[key])
    write_legacy(checkpoint, output)
    print(f"{len(packed)} layers written to {output}")


if __name__ == "__main__":
    main()
