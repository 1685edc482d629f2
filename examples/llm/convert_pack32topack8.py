"""Old checkpoints: int32 words into rows of int8, for the original's training kernels, and back with --to32.

python convert_pack32topack8.py old.pt old-pack8.pt
"""

from __future__ import annotations

import argparse

import torch

from sparsebit.llm.legacy import to_bytes, to_words


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--to32", action="store_true", help="the other direction")
    args = parser.parse_args(arguments)
    with torch.serialization.safe_globals([argparse.Namespace]):
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    kind, change = (torch.int8, to_words) if args.to32 else (torch.int32, to_bytes)
    packed = [key for key, value in checkpoint["model"].items() if key.endswith(".qweight")]
    wrong = [key for key in packed if checkpoint["model"][key].dtype != kind]
    if wrong or not packed:
        raise SystemExit(f"{args.checkpoint}: {wrong[0] if wrong else 'every layer'} is not packed as {kind}")
    for key in packed:
        checkpoint["model"][key] = change(checkpoint["model"][key])
    torch.save(checkpoint, args.output)
    print(f"{len(packed)} layers written to {args.output}")


if __name__ == "__main__":
    main()
