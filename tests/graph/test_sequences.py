"""Packed sequences in graphs: traced as single calls, stored by lanes, moved between devices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from sparsebit.graph.run.batches import as_iterable
from sparsebit.graph.run.calls import Call, to_device
from sparsebit.graph.run.lanes import Lane
from sparsebit.graph.run.signature import signature_of
from sparsebit.graph.run.stores import Store
from sparsebit.graph.trace.from_module import trace
from sparsebit.graph.trace.tracer import LeafTracer


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x, lengths):
        out, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        out = out if isinstance(out, PackedSequence) else out.nothing
        return self.fc(pad_packed_sequence(out, batch_first=True)[0])


CALLS = [
    ((torch.randn(3, 5, 4), torch.tensor([3, 5, 2])), {}),
    ((torch.randn(2, 3, 4), torch.tensor([3, 1])), {}),
]


def test_single_calls_with_and_without_an_example():
    torch.manual_seed(0)
    model = Tagger().eval()
    for example in (None, CALLS[0]):
        gm = trace(model, LeafTracer(), example)
        assert not gm.meta["islands"]
        functions = [n.target for n in gm.graph.nodes if n.op == "call_function"]
        assert pack_padded_sequence in functions and pad_packed_sequence in functions
        for args, _ in CALLS:
            torch.testing.assert_close(gm(*args), model(*args))


def test_a_trace_within_a_trace_leaves_torch_as_it_was():
    code, tracer = pack_padded_sequence.__code__, LeafTracer()
    with tracer.prepared_torch():
        assert trace(Tagger(), LeafTracer()).meta["islands"] == {}
        packed = pack_padded_sequence(torch.ones(2, 3, 1), [3, 1], batch_first=True)  # no proxy: as ever
        assert packed.batch_sizes.tolist() == [2, 1, 1] and code is not pack_padded_sequence.__code__
    assert pack_padded_sequence.__code__ is code


def test_lanes_keep_them_anywhere():
    torch.manual_seed(0)
    gm = trace(Tagger().eval(), LeafTracer())
    for keep in ("device", "cpu", "disk"):
        lane = Lane(gm, CALLS, Store(keep))
        for node in gm.graph.nodes:
            lane.step(node)
            if node.target is pack_padded_sequence:
                assert all(isinstance(value, PackedSequence) for value in lane.outputs(node))
            if node.op == "output":
                for got, (args, _) in zip(lane.outputs(node), CALLS):
                    torch.testing.assert_close(got, gm(*args))


def test_one_is_one_input():
    packed = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    signature = signature_of(nn.GRU(4, 6))
    assert Call.of(packed, signature)[0][0] is packed and as_iterable(packed) == [packed]


def test_sizes_stay_on_the_cpu():
    packed = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    moved = to_device({"x": (packed, torch.ones(2))}, torch.device("meta"))["x"]
    assert moved[0].data.device.type == moved[1].device.type == "meta"
    assert moved[0].batch_sizes.device.type == "cpu"


class Repacks(nn.Module):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        again = PackedSequence(packed.data * 2, packed.batch_sizes)
        return pad_packed_sequence(again, batch_first=True)[0]


def test_a_new_packed_sequence_is_a_call():
    call = ((torch.randn(2, 3, 4), torch.tensor([3, 1])), {})
    gm = trace(Repacks(), LeafTracer(), call)
    assert not gm.meta["islands"]
    assert any(node.target is PackedSequence for node in gm.graph.nodes)
    torch.testing.assert_close(gm(*call[0]), Repacks()(*call[0]))
