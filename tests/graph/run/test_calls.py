"""Call: every batch and every example becomes the arguments of one forward, by one rule."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from sparsebit.graph.run import calls
from sparsebit.graph.run.calls import Call, device_of, targets_of, to_device

X, Y = torch.ones(4, 3), torch.arange(4)


def signature(forward):
    return inspect.signature(forward)


ONE = signature(lambda x: x)
TWO = signature(lambda x, z: x)
OPTIONAL = signature(lambda x, mask=None: x)
ANY = signature(lambda *args, **kwargs: None)
PACKED = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
BOUND = OPTIONAL.bind(X, mask=Y)


@pytest.mark.parametrize(
    ("batch", "takes", "args", "kwargs"),
    [
        (X, ONE, (X,), {}),
        ((X,), ONE, (X,), {}),
        ([X, Y], TWO, (X, Y), {}),
        ((X, Y), ONE, (X,), {}),  # (inputs, target)
        ((X, Y, Y), TWO, (X, Y), {}),
        ((X, Y), OPTIONAL, (X,), {}),
        ((X, Y), ANY, (X, Y), {}),
        ({"x": X, "mask": Y}, OPTIONAL, (), {"x": X, "mask": Y}),
        (({"x": X}, Y), OPTIONAL, (), {"x": X}),
        (Call((X,), {"mask": Y}), OPTIONAL, (X,), {"mask": Y}),
        (BOUND, OPTIONAL, BOUND.args, BOUND.kwargs),
        (PACKED, ONE, (PACKED,), {}),
    ],
)
def test_a_batch_becomes_arguments(batch, takes, args, kwargs):
    call = Call.of(batch, takes)
    assert len(call.args) == len(args) and all(a is b for a, b in zip(call.args, args))
    assert call.kwargs.keys() == kwargs.keys() and all(call.kwargs[k] is v for k, v in kwargs.items())


def test_a_tensor_that_could_be_an_optional_input_is_reported_once(caplog):
    calls._report_once.cache_clear()
    with caplog.at_level(logging.INFO, "sparsebit"):
        for _ in range(2):
            Call.of((X, X), OPTIONAL)
            Call.of((X, Y), ONE)
    assert len(caplog.records) == 1 and "mask" in caplog.text and caplog.records[0].levelname == "WARNING"


def test_targets_are_the_tensors_behind_the_inputs():
    assert targets_of((X, Y), ONE) == [Y] and targets_of(({"x": X}, Y), ONE) == [Y]
    assert targets_of(X, ONE) == [] and targets_of((X, Y), TWO) == []


def test_bind_adds_the_defaults_and_in_order_of_sorts_names():
    assert list(Call((X,), {}).bind(OPTIONAL)) == ["x", "mask"]
    assert list(Call((), {"mask": Y, "x": X}).in_order_of(OPTIONAL).kwargs) == ["x", "mask"]


def test_a_copy_can_be_written_to_and_is_no_larger_than_its_slice():
    large = torch.zeros(1000, 3, requires_grad=True)
    call = Call((large[:2], [PACKED]), {"again": large})
    copied = call.copy()
    assert copied.args[0].untyped_storage().nbytes() == 2 * 3 * 4
    assert copied.kwargs["again"].requires_grad and isinstance(copied.args[1][0], PackedSequence)
    copied.args[0].detach().fill_(5)
    assert not large.any()


def test_run_leaves_the_inputs_alone():
    x = torch.ones(2)
    out = Call((x,), {}).run(nn.ReLU(inplace=True).eval())
    Call((x,), {}).run(lambda v: v.mul_(0))  # type: ignore[arg-type]
    assert out.eq(1).all() and x.eq(1).all()


def test_text_samples_and_tensors():
    call = Call((X,), {"y": Y, "flag": True})
    assert str(call) == "float32 4x3, y=int64 4, flag=bool"
    assert call.samples() == 4 and len(call.tensors()) == 2 and str(Call((), {})) == "nothing"


def test_device_of_looks_for_the_first_tensor_with_data():
    norm = nn.BatchNorm1d(2, affine=False)  # buffers only
    assert device_of(norm) == torch.device("cpu") and device_of(nn.ReLU()) is None
    with torch.device("meta"):
        absent = nn.Linear(2, 2)
    assert device_of(absent) is None and device_of(nn.Sequential(absent, nn.Linear(2, 2))) == torch.device(
        "cpu"
    )


def test_to_device_moves_tensors_and_whole_packed_sequences():
    assert to_device(X, None) is X
    moved = to_device({"a": [X, PACKED]}, torch.device("cpu"))["a"]
    assert torch.equal(moved[0], X) and moved[1].batch_sizes.device.type == "cpu"
    assert Call((X,), {}).to(torch.device("meta")).args[0].is_meta
