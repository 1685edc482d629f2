"""Legacy: the import path `sparsebit.llm.qlora`; the code is in sparsebit.llm.training.qlora."""

from sparsebit.llm.training.qlora import Merged as Merged
from sparsebit.llm.training.qlora import merge as merge
from sparsebit.llm.training.qlora import requantize as requantize
from sparsebit.llm.training.qlora import save as save
