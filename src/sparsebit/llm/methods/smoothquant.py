"""smoothquant: weights and activations in 8 bits; scales move the ranges of activations into the weights."""

from sparsebit.llm.methods import METHODS, Method
from sparsebit.numeric.solvers.smoothquant import smooth_scales, smoothquant

RANGE = "from 0 (all range in the activations) to 1 (all in the weights)"
METHODS.register("smoothquant")(
    Method(
        smoothquant,
        needs_data=True,
        twin=False,
        activations=True,
        scales=smooth_scales,
        limits={"alpha": (lambda value: 0 <= value <= 1, RANGE)},
        bits=8,
        group_size=-1,
        format="int-quantized",
    )
)
