"""hqq: zero points are searched so that a robust norm of the weight's error is small. It needs no data."""

from sparsebit.llm.methods import METHODS, Method
from sparsebit.numeric.solvers.hqq import hqq

METHODS.register("hqq")(Method(hqq, uses_data=False))
