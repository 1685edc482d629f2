"""awq: channels with large inputs are scaled up before rounding; the inverse scales move into earlier layers."""

from sparsebit.llm.methods import METHODS, Method
from sparsebit.numeric.solvers.awq import awq, awq_scales

METHODS.register("awq")(Method(awq, needs_data=True, twin=False, scales=awq_scales))
