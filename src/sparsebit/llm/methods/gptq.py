"""gptq: columns are rounded one after the other, and the columns that follow compensate the error."""

from sparsebit.llm.methods import ABOVE_ZERO, CLIP, METHODS, NOT_NEGATIVE, Method
from sparsebit.numeric.solvers.gptq import gptq

LIMITS = {"damping": ABOVE_ZERO, "refine": NOT_NEGATIVE, "clip": CLIP}
METHODS.register("gptq")(Method(gptq, needs_data=True, limits=LIMITS))
