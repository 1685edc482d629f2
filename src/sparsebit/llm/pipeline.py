"""Legacy: the import path `sparsebit.llm.pipeline`; the code is in sparsebit.llm.training.pipeline."""

from sparsebit.llm.training.pipeline import Stage as Stage
from sparsebit.llm.training.pipeline import cut as cut
