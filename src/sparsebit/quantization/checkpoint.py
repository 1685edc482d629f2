"""A quantized model on disk: `model.safetensors` (weights, scales) and `qconfig.yaml`, both written atomically."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.quantization.quantizers import Quantizer
from sparsebit.utils.files import write_whole

WEIGHTS = "model.safetensors"
CONFIG = "qconfig.yaml"


def save_checkpoint(qmodel: Any, folder: Path) -> None:
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: _alone(value) for name, value in qmodel.state_dict().items()}
    changed = {name: [q.bit, q.absorbed, q.is_symmetric, q.use_quant] for name, q in _all_quantizers(qmodel)}
    about = {"quantizers": changed, "training": qmodel.training, "trace": qmodel.front_end}
    write_whole(folder / WEIGHTS, save(state, {"sparsebit": json.dumps(about)}))
    write_whole(folder / CONFIG, qmodel.cfg.without_new_keys().dump().encode())


def load_checkpoint(build: Callable[[Path, str], Any], folder: Path) -> Any:
    """`build(config, front_end)` makes the new QuantModel that takes the saved state.

    front_end  the front-end that traced the saved model; empty in files of earlier versions.
    """
    from safetensors import safe_open

    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise SparsebitError(
                f"{folder} holds no saved QuantModel: {name} is missing; write one with save()"
            )
    with safe_open(str(folder / WEIGHTS), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        about = json.loads((file.metadata() or {}).get("sparsebit", "{}"))
    qmodel = build(folder / CONFIG, about.get("trace", ""))
    saved = about.get("quantizers", {})
    for name, quantizer in _all_quantizers(qmodel):
        if name in saved:
            bit, absorbed, symmetric, _ = saved[name]
            quantizer.qdesc.set_bit(bit)
            quantizer.qdesc.set_symmetric(symmetric)
            quantizer.absorbed = absorbed
    qmodel.load_state_dict(state)
    for name, quantizer in _all_quantizers(qmodel):
        if name in saved and saved[name][3]:
            quantizer.enable_quant()
    return qmodel.train(about.get("training", qmodel.training))


def _all_quantizers(qmodel: nn.Module) -> list[tuple[str, Quantizer]]:
    return [(name, m) for name, m in qmodel.named_modules() if isinstance(m, Quantizer)]


def _alone(x: Tensor) -> Tensor:
    """Tied weights are written once per name: safetensors refuses tensors that share memory."""
    return x.detach().to("cpu", copy=True).contiguous()
