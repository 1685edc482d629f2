"""The float layer's outputs as the aim: the same as the difference of inputs, from a smaller sum."""

from __future__ import annotations

import copy

import torch
from test_solvers import problem, spec_of
from test_walk import tiny, tokens

from sparsebit.llm.models.blocks import linears_of
from sparsebit.llm.walk.capture import capture
from sparsebit.llm.walk.lane import Lane
from sparsebit.llm.walk.statistics import collect
from sparsebit.numeric.solvers.gptq import Statistics, gptq


def test_both_ways_to_say_it_give_the_same_weight():
    weight, x = problem(rows=24, inputs=48, tokens=300)
    other = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    h = x.T @ x
    a = gptq(weight, Statistics(h, (other - x).T @ x), spec_of(4, True, 16))
    b = gptq(weight, Statistics(h, aim=(other @ weight.T).T @ x), spec_of(4, True, 16))
    plain = gptq(weight, Statistics(h), spec_of(4, True, 16))
    assert (a.codes != b.codes).double().mean() < 5e-3 < (a.codes != plain.codes).double().mean()


def test_narrow_layers_are_aimed_at_what_the_float_layer_gives():
    model = tiny()
    block, other = model.layers[0], copy.deepcopy(model.layers[0])
    block.down.bias = torch.nn.Parameter(torch.ones(32))
    other.down.bias = torch.nn.Parameter(torch.ones(32))
    captured = capture(model, model.layers, tokens(), copy.deepcopy(block))
    moved, names = [h + 0.1 for h in captured.hidden], list(linears_of(block))
    lanes = (Lane(b, captured.calls[0], h, names) for b, h in ((block, captured.hidden), (other, moved)))
    found = collect(next(lanes), [["gate", "up"], ["down"]], next(lanes))
    assert found["gate"].aim is None and found["gate"].cross is not None and found["down"].cross is None
    seen: list[torch.Tensor] = []
    hook = lambda module, args, output: seen.append(args[0].flatten(0, 1))
    for b, hidden in ((block, captured.hidden), (other, moved)):
        handle = b.down.register_forward_hook(hook)
        for call, h in zip(captured.calls[0], hidden):
            call.run(b, h)
        handle.remove()
    x, y = torch.cat(seen[:3]), torch.cat(seen[3:]) @ other.down.weight.T
    torch.testing.assert_close(found["down"].aim, y.T @ x, rtol=1e-3, atol=1e-3)
