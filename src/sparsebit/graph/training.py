"""Moved to sparsebit.graph.run.modes."""

from sparsebit.graph.run.modes import evaluating as evaluating
from sparsebit.graph.run.modes import set_training as set_training
from sparsebit.graph.run.modes import training_flags as training_flags
from sparsebit.graph.trace.dropout import Rate as Rate
