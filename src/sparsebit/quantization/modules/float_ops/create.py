"""New tensors: constants, ranges, random numbers."""

from __future__ import annotations

from sparsebit.quantization.modules.base import Opr, define, spelled

Create = define(
    "Create",
    Opr,
    *spelled("zeros ones full empty arange range linspace logspace eye tensor as_tensor scalar_tensor"),
    *spelled("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor"),
    *spelled("tril_indices triu_indices hann_window hamming_window"),
)
Random = define(
    "Random",
    Opr,
    *spelled(
        "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson"
    ),
)
