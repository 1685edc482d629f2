"""Time of packed Linear layers against float layers with the dequantized weight, for one token and for more.

    OMP_NUM_THREADS=1 python benchmarks/quant_linear.py
    OMP_NUM_THREADS=1 python benchmarks/quant_linear.py --cached
    OMP_NUM_THREADS=1 SPARSEBIT_NATIVE=0 python benchmarks/quant_linear.py     # as where no compiler is

Figures are packed / float: below 1 the packed layer is the faster one. Best of --rounds interleaved rounds. As in a
model, many layers run in turn, so weights come from memory; --cached: one layer again and again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparsebit.llm import QuantLinear
from sparsebit.numeric.quantized_weight import QuantizedWeight

SHAPES = ((576, 1536), (2048, 2048), (4096, 4096))  # outputs, inputs


def layers(shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear]:
    outputs, inputs = shape
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group).add_(0.5).mul_(0.01).half()
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.uint8)
    packed = QuantLinear(QuantizedWeight(codes, scales, zeros, bits, group=group), dtype=dtype)
    plain = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    plain.weight.data = packed.dequantize(dtype)
    return packed, plain


def in_turn(layer: nn.Linear, x: Tensor, megabytes: int) -> Callable[[], object]:
    """A call of the next of so many copies that their float weights fill `megabytes`."""
    size = 4 * layer.in_features * layer.out_features
    copies = [layer, *(copy.deepcopy(layer) for _ in range(megabytes * 2**20 // size))]
    turn = itertools.cycle(copies)
    return lambda: next(turn)(x)


def best(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of one call; a round is a millisecond or a call: short, because a busy machine interrupts long ones."""
    counts = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        counts.append(max(1, min(100, int(0.001 / (time.perf_counter() - start)))))
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, (call, count) in enumerate(zip(calls, counts)):
            start = time.perf_counter()
            for _ in range(count):
                call()
            least[i] = min(least[i], (time.perf_counter() - start) / count)
    return least


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cached", dest="megabytes", action="store_const", const=0, default=256)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} thread(s), groups of {args.group}; packed / float, (float in ms)")
    for tokens in args.tokens:
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                shown = []
                for bits in args.bits:
                    pair = layers(shape, bits, args.group, dtype)
                    x = torch.randn(tokens, shape[1], dtype=dtype)
                    packed, plain = best([in_turn(layer, x, args.megabytes) for layer in pair], args.rounds)
                    shown.append(f"{bits} bit {packed / plain:5.2f} ({1e3 * plain:6.3f})")
                name = f"{tokens} token(s), {str(dtype)[6:]}, {shape[0]} x {shape[1]}"
                print(f"{name:36s} {'  '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
