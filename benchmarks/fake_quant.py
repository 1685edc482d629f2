"""Fake quantization against a plain copy (the memory limit), the naive formula and torch's own op, in one run.

python benchmarks/fake_quant.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sparsebit.numeric import QuantSpec, fake_quantize, qparams_from_minmax


def best(work: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; times as multiples of a copy")
    for shape in ((8, 32, 112, 112), (8, 96, 112, 112), (8, 576, 14, 14)):
        x = torch.randn(shape)
        y = x.clone()
        for axis in (None, 1):
            spec = QuantSpec(8, False, axis)
            rows = x.movedim(1, 0).flatten(1) if axis else x.reshape(1, -1)
            qp = qparams_from_minmax(rows.amin(1), rows.amax(1), spec)
            s, z = (p.view(-1, 1, 1) if axis else p for p in (qp.scale, qp.zero_point))
            native = (
                (
                    lambda s=qp.scale, z=qp.zero_point: torch.fake_quantize_per_channel_affine(
                        x, s, z.int(), 1, 0, 255
                    )
                )
                if axis
                else (
                    lambda s=qp.scale, z=qp.zero_point: torch.fake_quantize_per_tensor_affine(
                        x, s, z.int(), 0, 255
                    )
                )
            )
            copy = best(x.clone)
            rows_out = {
                "sparsebit": best(lambda: fake_quantize(x, qp, spec)),
                "in place": best(lambda: fake_quantize(y, qp, spec, inplace=True)),
                "naive": best(lambda: ((x / s).round() + z).clamp(0, 255).sub(z) * s),
                "torch's op": best(native),
            }
            text = ", ".join(f"{name} {value / copy:.1f}" for name, value in rows_out.items())
            print(f"{'x'.join(map(str, shape)):15s} {'per channel' if axis else 'per tensor ':11s} {text}")


if __name__ == "__main__":
    main()
