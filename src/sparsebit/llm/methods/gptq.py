"""gptq: columns are rounded one after the other, and the columns that follow make up for the error."""

from sparsebit.llm.methods import METHODS, Method
from sparsebit.numeric.solvers.gptq import gptq

METHODS.register("gptq")(Method(gptq, needs_data=True))
