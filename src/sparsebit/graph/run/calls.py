"""Call: the arguments of one forward. Every batch and every example of the user becomes one."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

log = logging.getLogger("sparsebit")
CPU = torch.device("cpu")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Call(NamedTuple):
    """The arguments of one forward: positional ones and keyword ones."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, batch: Any, signature: inspect.Signature) -> Call:
        """The arguments in one batch of the user.

        A mapping holds keyword arguments, a tuple or list positional ones, and any other value is the only argument.
        A tuple that is longer than the forward requires, such as the (x, y) of a DataLoader, is cut to the required
        inputs. Optional inputs are therefore given by name, in a mapping; a target may stand behind it: ({"x": x}, y).
        A Call, or the bound arguments of inspect, are taken without a change.
        """
        if isinstance(batch, Call):
            return batch
        if isinstance(batch, inspect.BoundArguments):
            return cls(batch.args, batch.kwargs)
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        if not isinstance(batch, (tuple, list)) or isinstance(batch, PackedSequence):
            return cls((batch,), {})
        if len(batch) == 2 and isinstance(batch[0], Mapping) and _takes(signature, batch[0]):
            return cls((), dict(batch[0]))
        required = _required(signature)
        if 0 < required < len(batch):
            _report_targets(batch, required, signature)
            return cls(tuple(batch[:required]), {})
        return cls(tuple(batch), {})

    @classmethod
    def of_example(cls, example: Any, signature: inspect.Signature) -> Call:
        """The arguments in an example. Unlike a batch, it keeps optional inputs that a tuple gives by their place."""
        if isinstance(example, tuple) and not isinstance(example, (Call, PackedSequence)):
            takes_a_list = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
            places = sum(p.kind in POSITIONAL for p in signature.parameters.values())
            if takes_a_list or _required(signature) <= len(example) <= places:
                return cls(example, {})
        return cls.of(example, signature)

    def bind(self, signature: inspect.Signature) -> dict[str, Any]:
        """Every argument by its name, with the defaults of those that the call leaves out."""
        bound = signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def in_order_of(self, signature: inspect.Signature) -> Call:
        """A copy of the call with its keyword arguments in the order of the signature."""
        names = [name for name in signature.parameters if name in self.kwargs]
        others = [name for name in self.kwargs if name not in signature.parameters]
        return Call(self.args, {name: self.kwargs[name] for name in (*names, *others)})

    def to(self, device: torch.device | None) -> Call:
        """The call with its tensors on `device`."""
        args, kwargs = to_device((self.args, self.kwargs), device)
        return Call(args, kwargs)

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The call with `change` applied to each of its tensors."""
        args, kwargs = pytree.tree_map_only(Tensor, change, (self.args, self.kwargs))
        return Call(args, kwargs)

    def copy(self) -> Call:
        """A copy for a forward that may write into its inputs. Of a slice of a large tensor, only the slice
        is copied."""
        copies: dict[int, Any] = {}
        for x in self.tensors():
            copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return Call(copy.deepcopy(tuple(self.args), copies), copy.deepcopy(dict(self.kwargs), copies))

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def samples(self) -> int:
        """The length of the longest first axis; 1 if no tensor has an axis."""
        return max((len(x) for x in self.tensors() if x.dim()), default=1)

    def run(self, model: nn.Module) -> Any:
        """The output of `model` for a copy of this call, because the model may write into its inputs."""
        args, kwargs = self.copy()
        return model(*args, **kwargs)

    def __str__(self) -> str:
        """Dtypes and sizes for messages: `float32 4x3x16x16, y=int64 4`."""
        named = [f"{key}={_looks(value)}" for key, value in self.kwargs.items()]
        return ", ".join([*map(_looks, self.args), *named]) or "nothing"


def device_of(module: nn.Module) -> torch.device | None:
    """The device of the first parameter or buffer that has data; None if the module has no such tensor."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), None)


def to_device(value: Any, device: torch.device | None) -> Any:
    """`value` with its tensors on `device`; without a device they stay where they are.

    A packed sequence moves as a whole: its lengths have to stay on the CPU.
    """
    if device is None:
        return value

    def moved(x: Any) -> Any:
        if isinstance(x, (Tensor, PackedSequence)):
            return x.to(device)  # type: ignore[arg-type]
        return x

    return pytree.tree_map(moved, value, is_leaf=lambda x: isinstance(x, PackedSequence))


def targets_of(batch: Any, signature: inspect.Signature) -> list[Tensor]:
    """The tensors behind the inputs of a batch: the y of (x, y)."""
    if isinstance(batch, (Call, PackedSequence)) or not isinstance(batch, (tuple, list)):
        return []
    call = Call.of(batch, signature)
    if call.kwargs:
        behind = batch[1:]
    else:
        behind = batch[len(call.args) :]
    return [value for value in behind if isinstance(value, Tensor)]


def _looks(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'scalar'}"


def _report_targets(batch: Sequence[Any], required: int, signature: inspect.Signature) -> None:
    """(x, mask) looks like (x, target): report where the cut value could be an optional argument."""
    names = [p.name for p in signature.parameters.values() if p.kind in POSITIONAL]
    if len(names) > required:
        cut = batch[required]
        is_classes = isinstance(cut, Tensor) and cut.dim() <= 1 and not cut.is_floating_point()
        level = logging.INFO if is_classes else logging.WARNING
        _report_once(len(batch), required, tuple(names), level)


@functools.cache  # once per kind of batch
def _report_once(size: int, required: int, names: tuple[str, ...], level: int) -> None:
    if required == 1:
        taken = "the first"
    else:
        taken = f"the first {required}"
    keys = ", ".join(f'"{name}"' for name in names[: required + 1])
    message = (
        "batches: of each tuple of %d, %s is taken for the inputs (%s) and the rest for targets. If %s is meant, "
        "give mappings with the keys %s"
    )
    log.log(level, message, size, taken, ", ".join(names[:required]), names[required], keys)


def _takes(signature: inspect.Signature, names: Mapping[Any, Any]) -> bool:
    try:
        signature.bind(**names)
    except TypeError:
        return False
    return True


def _required(signature: inspect.Signature) -> int:
    return sum(p.kind in POSITIONAL and p.default is p.empty for p in signature.parameters.values())
