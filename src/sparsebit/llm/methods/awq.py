"""awq: channels with large inputs are scaled up before rounding; the inverse scales move into earlier layers."""

from sparsebit.llm.methods import AT_LEAST_ONE, CLIP, METHODS, Method
from sparsebit.numeric.solvers.awq import awq, awq_scales

LIMITS = {"points": AT_LEAST_ONE, "clip": CLIP}
METHODS.register("awq")(Method(awq, needs_data=True, twin=False, scales=awq_scales, limits=LIMITS))
