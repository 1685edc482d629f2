"""The part that all training examples share: calibrate, measure, train on with quantization, measure again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from helpers import loops
from torch import Tensor, nn

import sparsebit


def train_quantized(
    model: nn.Module,
    config: Any,
    data: Sequence[Tensor],
    epochs: int,
    lr: float,
    score: Callable[[Any], float],
    loss: Callable[..., Tensor] = loops.classify,
) -> tuple[sparsebit.QuantModel, dict[str, float]]:
    """`data` as for loops.fit; `score(model)` is measured in float, after calibration and after training."""
    batches = list(zip(*(part[:256].split(32) for part in data)))
    qmodel = sparsebit.QuantModel(model, config, example=batches[0]).calibrate(batches)
    qmodel.init_QAT()
    results = {"float": score(model), "calibrated": score(qmodel)}
    loops.fit(qmodel, data, epochs, loss=loss, groups=qmodel.qat_parameter_groups(lr, weight_decay=1e-4))
    results["trained"] = score(qmodel)
    qmodel.fold_batchnorm()  # where the config did not fold them before; weights keep their codes
    return qmodel, results
