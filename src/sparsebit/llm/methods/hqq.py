"""hqq: zero points are searched so that a robust norm of the weight's error is small. It needs no data."""

from sparsebit.llm.methods import METHODS, NOT_NEGATIVE, Method
from sparsebit.numeric.solvers.hqq import hqq

LIMITS = {"p": (lambda value: 0 < value <= 2, "must be above 0 and at most 2"), "rounds": NOT_NEGATIVE}
METHODS.register("hqq")(Method(hqq, uses_data=False, limits=LIMITS))
