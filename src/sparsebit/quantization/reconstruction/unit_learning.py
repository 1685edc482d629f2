"""One unit of reconstruction: learn the rounding of its weights, and with it their steps and the biases, on samples.

Activations of few bits are rounded while learning, half of the values at random (Wei et al., QDrop, 2022), and
their scales are learned too; 8-bit ones are left float, which costs nothing and is faster. Half of the inputs come
from the float network, so that a unit does not learn the errors of a few images by heart. The result is kept only
where it is closer to the float network than plain rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import module_of
from sparsebit.graph.run.stores import Store
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Mode, Quantizer
from sparsebit.quantization.quantizers.adaround import AdaRoundQuantizer, learn
from sparsebit.quantization.reconstruction.units import Unit

GAIN_LR = 3e-3  # of the length of a weight's step, which starts at 1
BIAS_LR = 2e-2  # of biases, as a share of their size
SCALE_LR = 1e-3  # of the scales of activations, as a share of them
FEW_BITS = 8  # activations of fewer bits are rounded while learning
DROP = 0.5  # share of the activations that are left float then, and of the inputs that are those of the float network
TEST_IMAGES = 32  # on which before and after are compared
ENOUGH = 1024  # positions (height x width) of an image: larger images need fewer of them per step
LEAST_IMAGES = 2

Env = dict[fx.Node, Any]
Run = Callable[[Env], None]


class Samples:
    """Inputs and float outputs of one unit over all calibration images; `draw` takes some of the images.

    Where a value is not a tensor with an entry per image, a whole recorded batch is drawn instead.
    """

    def __init__(
        self, unit: Unit, store: Store, inputs: list[Env], float_inputs: list[Env], targets: list[list[Any]]
    ):
        self.store = store
        self.inputs = inputs
        self.float_inputs = float_inputs
        self.targets = targets
        self.constants = {n for n in unit.inputs if n.op == "get_attr"}
        self.sizes = [0] * len(targets)
        self.positions = 1
        self.separable = self._look()

    def _look(self) -> bool:
        """The number of images of each batch, and whether all values can be split into images of the same shape."""
        shapes = set()
        separable = True
        for i in range(len(self.targets)):
            env, targets = self._rows(i, None)
            self.sizes[i] = len(targets[0]) if targets[0].dim() else 1
            values = [v for n, v in env.items() if n not in self.constants] + targets
            separable &= all(
                isinstance(v, Tensor) and v.dim() > 0 and len(v) == self.sizes[i] for v in values
            )
            if separable:
                shapes.add(tuple(v.shape[1:] for v in values))
                self.positions = max(math.prod(v.shape[2:]) for v in values)
        return separable and len(shapes) == 1

    def draw(self, count: int, generator: torch.Generator, mix: float = 0.0) -> tuple[Env, list[Tensor]]:
        """Values of `count` images, chosen at random (on disk, from a few batches only); `mix` is the share of the
        inputs that are taken from the float network."""
        if not self.separable:
            batch = int(torch.randint(len(self.sizes), (), generator=generator))
            return self._drawn(batch, None, mix, generator)
        batches = torch.randperm(len(self.sizes), generator=generator)
        if self.store.keep == "disk":
            batches = batches[:2]
        index = torch.cat(
            [torch.stack([b.expand(n), torch.arange(n)]) for b in batches for n in [self.sizes[b]]], 1
        )
        index = index[:, torch.randperm(index.shape[1], generator=generator)[:count]]
        parts = [self._drawn(int(b), index[1][index[0] == b], mix, generator) for b in index[0].unique()]
        env = {}
        for n, v in parts[0][0].items():
            env[n] = v if n in self.constants else torch.cat([p[0][n] for p in parts])
        return env, [torch.cat(column) for column in zip(*(p[1] for p in parts))]

    def _drawn(
        self, batch: int, rows: Tensor | None, mix: float, generator: torch.Generator
    ) -> tuple[Env, list[Tensor]]:
        env, targets = self._rows(batch, rows)
        if mix and self.float_inputs is not self.inputs:
            exact, _ = self._rows(batch, rows, exact=True)
            for n, value in env.items():
                if n not in self.constants and isinstance(value, Tensor) and value.is_floating_point():
                    chosen = torch.rand(value.shape, generator=generator) < mix
                    env[n] = torch.where(chosen.to(value.device), exact[n], value)
        return env, targets

    def _rows(self, batch: int, rows: Tensor | None, exact: bool = False) -> tuple[Env, list[Tensor]]:
        def take(value: Any) -> Any:
            value = self.store.get(value)
            if rows is None:
                return value
            return value[rows.to(value.device)]

        inputs = (self.float_inputs if exact else self.inputs)[batch].items()
        env = {}
        for n, v in inputs:
            env[n] = self.store.get(v) if n in self.constants else take(v)
        return env, [] if exact else [take(t) for t in self.targets[batch]]


class UnitLearning:
    """The work on one unit, inside `quantized(unit)`; `run` computes the unit's nodes from its inputs."""

    def __init__(self, unit: Unit, gm: fx.GraphModule, samples: Samples, run: Run, seed: int):
        self.unit = unit
        self.samples = samples
        self.compute = run
        self.generator = torch.Generator().manual_seed(seed)
        tops = [module_of(n, gm) for n in unit.nodes if n.op == "call_module"]
        self.modules = list(dict.fromkeys(m for top in tops for m in top.modules()))
        quantizers = (m.input_quantizer for m in self.modules if isinstance(m, QuantOpr))
        self.inputs = [q for q in quantizers if q is not None and q.is_enable and not q.unused]
        self.options: AdaRoundQuantizer.Params = weight_quantizer(unit.layers[0]).params
        most = self.options.batch_size
        self.images = max(min(LEAST_IMAGES, most), min(most, most * ENOUGH // samples.positions))
        drawn = range(-(-TEST_IMAGES // self.images) if samples.separable else 1)
        self.tests = [samples.draw(self.images, self.generator) for _ in drawn]

    def run(self, on_step: Callable[[int, float], None]) -> tuple[float, float]:
        """Learn; returns the squared error before and after, as a share of the squared output."""
        for layer in self.unit.layers:
            weight_quantizer(layer).forget()
        state = State(self.modules)
        energy = (
            self.mean([sum(t.square().mean().item() for t in targets) for _, targets in self.tests]) or 1.0
        )
        before = after = self.error()
        if before == 0:
            return 0.0, 0.0
        try:
            with self.only_learned():
                groups = self.groups()
                softs = [weight_quantizer(m).start(m.weight) for m in self.unit.layers]
                groups.append({"params": [s.gain for s in softs], "lr": GAIN_LR})
                with self.activations():
                    loss = lambda: (
                        self.distance(*self.samples.draw(self.images, self.generator, DROP)) / before
                    )
                    for step, value in enumerate(learn(softs, groups, loss, self.options)):
                        on_step(step, value)
            for m in self.unit.layers:
                weight_quantizer(m).settle(m.weight)
            after = self.error()
        except BaseException:  # also on Ctrl-C
            state.restore()
            raise
        if not after < before:
            state.restore()
            after = before
        return before / energy, after / energy

    def groups(self) -> list[dict[str, Any]]:
        """The other learned parameters beside the rounding, each with its learning rate."""
        groups: list[dict[str, Any]] = []
        for m in self.unit.layers:
            if m.bias_correction is not None:
                if m.bias is None:
                    size = m.weight.abs().amax()
                else:
                    size = m.bias.abs().mean()
                groups.append({"params": [m.bias_correction.requires_grad_()], "lr": BIAS_LR * size.item()})
        for q in self.inputs:
            if q.bit < FEW_BITS and not isinstance(q.scale, nn.Parameter):
                lr = SCALE_LR * q.scale.detach().mean().item()
                groups.append({"params": [q.scale.requires_grad_()], "lr": lr})
        return groups

    @contextmanager
    def only_learned(self) -> Iterator[None]:
        """No gradients for the parameters of the network; none for anything else afterwards."""
        frozen = [p for m in self.modules for p in m.parameters(recurse=False) if p.requires_grad]
        try:
            for p in frozen:
                p.requires_grad_(False)
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            buffers = (b for m in self.modules for b in m.buffers(recurse=False))
            for b in buffers:
                b.requires_grad_(False)
            for p in frozen:
                p.requires_grad_(True)

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Activations of few bits are rounded here and there, the others not at all."""

        def drop(quantizer: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            kept = torch.rand(out.shape, generator=self.generator, device="cpu") < DROP
            return torch.where(kept.to(out.device), args[0], out)

        few = [q for q in self.inputs if q.bit < FEW_BITS]
        hooks = [q.register_forward_hook(drop) for q in few]
        others = [(q, q.mode) for q in self.inputs if q not in few]
        try:
            for q, _ in others:
                q.mode = Mode.FLOAT
            yield
        finally:
            for q, mode in others:
                q.mode = mode
            for hook in hooks:
                hook.remove()

    def distance(self, values: Env, targets: list[Tensor]) -> Tensor:
        """Mean squared error of the outputs, summed over them."""
        values = {n: _channels_last(v) for n, v in values.items()}
        self.compute(values)
        pairs = zip(self.unit.outputs, targets)
        return torch.stack([nn.functional.mse_loss(values[n].float(), t.float()) for n, t in pairs]).sum()

    @torch.no_grad()
    def error(self) -> float:
        return self.mean([self.distance(*test).item() for test in self.tests])

    @staticmethod
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)


class State:
    """Everything that learning may change in a unit: to go back to, or to keep."""

    def __init__(self, modules: list[nn.Module]):
        self.places = list(itertools.chain.from_iterable(map(_places, modules)))
        self.values = [getattr(owner, name).detach().clone() for owner, name in self.places]

    def restore(self) -> None:
        for (owner, name), value in zip(self.places, self.values):
            if isinstance(owner, AdaRoundQuantizer):
                owner.soft = None
            old = getattr(owner, name)
            if isinstance(old, nn.Parameter):
                old.data = value.clone()
            else:
                setattr(owner, name, value.to(old.device).clone())


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if isinstance(module, Quantizer):
        yield from ((module, name) for name in ("scale", "zero_point"))
    if isinstance(module, AdaRoundQuantizer):
        yield module, "shift"
    if isinstance(module, QuantOpr) and module.bias_correction is not None:
        yield module, "bias_correction"


def weight_quantizer(layer: QuantOpr) -> AdaRoundQuantizer:
    assert isinstance(layer.weight_quantizer, AdaRoundQuantizer)
    return layer.weight_quantizer


def _channels_last(value: Any) -> Any:
    """Depthwise convolutions on CPUs are several times faster so."""
    is_image = isinstance(value, Tensor) and value.dim() == 4
    if is_image:
        return value.contiguous(memory_format=torch.channels_last)
    return value
