"""Legacy: the import path `sparsebit.llm.nf4`; the code is in sparsebit.llm.training.nf4."""

from sparsebit.llm.training.nf4 import is_nf4 as is_nf4
from sparsebit.llm.training.nf4 import nf4 as nf4
from sparsebit.llm.training.nf4 import nf4_layer as nf4_layer
from sparsebit.llm.training.nf4 import nf4_weight as nf4_weight
