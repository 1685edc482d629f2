"""Moved to sparsebit.graph.run; these names disappear when no caller is left."""

from collections.abc import Mapping
from typing import Any

from sparsebit.graph.run.batches import as_iterable as as_iterable
from sparsebit.graph.run.batches import feed as feed
from sparsebit.graph.run.batches import first_of as first_of
from sparsebit.graph.run.batches import refuse_odd_batch as refuse_odd_batch
from sparsebit.graph.run.calls import Call as Call
from sparsebit.graph.run.calls import targets_of as targets_of
from sparsebit.graph.run.calls import to_device as to_device
from sparsebit.graph.run.progress import tracked as tracked
from sparsebit.graph.run.signature import ANYTHING as ANYTHING
from sparsebit.graph.run.signature import signature_of as signature_of

as_call = Call.of


def own_call(args: Any, kwargs: Mapping[str, Any]) -> Call:
    return Call(args, dict(kwargs)).copy()
