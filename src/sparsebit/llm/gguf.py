"""GGUF, what llama.cpp and its kin read: layers of 4 bits as Q4_0, of 8 bits as Q8_0, with the codes that were solved.

Both are runs of 32 inputs with a float16 scale: symmetric grids whose groups are whole runs fit without loss. Q4_0
keeps input i and i + 16 in one byte. Names come from the gguf package; LLaMA's q and k rows are reordered, because
its rotary positions pair neighbours there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsebit.errors import ExportError
from sparsebit.llm.linear import QuantLinear
from sparsebit.numeric.quantized_weight import QuantizedWeight

RUN = 32
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}  # model_type -> theirs


def to_gguf(model: Any, path: str | Path, tokenizer: str | Path | None = None) -> None:
    """Writes a transformers model with QuantLinear layers; `tokenizer` is a folder with a tokenizer.json (BPE)."""
    gguf = _package()
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ExportError(
            f"gguf: {config.model_type} models cannot be written; there are: {', '.join(ARCHITECTURES)}"
        )
    writer = gguf.GGUFWriter(str(path), architecture)
    _describe(writer, config)
    if tokenizer is not None:
        _add_tokens(writer, Path(tokenizer), config)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            q, order = module.quantized(), _order(name, config, architecture)
            data = pack(q if order is None else _rows(q, order), name)
            kind = gguf.GGMLQuantizationType.Q4_0 if q.bits == 4 else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_name(names, name + ".weight"), data, raw_dtype=kind)
            if module.bias is not None:
                _add_float(writer, names, name + ".bias", module.bias, _order(name, config, architecture))
    for name, tensor in _others(model):
        _add_float(writer, names, name, tensor, _order(name.rpartition(".")[0], config, architecture))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pack(q: QuantizedWeight, name: str = "weight") -> np.ndarray:
    """(outputs, bytes) uint8: per run a float16 scale, then 16 bytes of 4-bit or 32 of 8-bit codes."""
    group = q.group or q.shape[1]
    if not q.symmetric or q.bits not in (4, 8) or q.g_idx is not None or group % RUN or q.shape[1] % group:
        raise ExportError(
            f"{name}: GGUF holds symmetric 4 or 8 bits in groups that are multiples of {RUN}; this layer has "
            f"{q.bits} bits, group {q.group} of {q.shape[1]} inputs; quantize with group_size=32 or 64"
        )
    scales = q.scales.to(torch.float16)
    if not torch.equal(scales.float(), q.scales.float()):  # bfloat16 scales may lie outside of float16
        raise ExportError(
            f"{name}: a scale of this layer is no float16 number; quantize a float16 or float32 model"
        )
    runs = q.codes.cpu().numpy().reshape(q.shape[0], -1, RUN)
    steps = scales.repeat_interleave(group // RUN, 1).cpu().numpy()[..., None].view(np.uint8)
    if q.bits == 4:
        body = runs[..., : RUN // 2] | (runs[..., RUN // 2 :] << np.uint8(4))
    else:
        body = (runs.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
    return np.ascontiguousarray(np.concatenate([steps, body], -1).reshape(q.shape[0], -1))


def _rows(q: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    return QuantizedWeight(
        q.codes[order], q.scales[order], q.zeros[order], q.bits, q.symmetric, q.group, q.g_idx
    )


def _order(name: str, config: Any, architecture: str) -> Tensor | None:
    """LLaMA's q and k: the halves of each head interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-1]
    )
    if architecture != "llama" or heads is None:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.arange(heads * size).view(heads, 2, size // 2).transpose(1, 2).reshape(-1)


def _others(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Float parameters, tied ones once."""
    inside = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, QuantLinear))
    return [(n, p) for n, p in model.named_parameters() if not n.startswith(inside)]


def _add_float(writer: Any, names: Any, name: str, tensor: Tensor, order: Tensor | None) -> None:
    values = tensor.detach().cpu()
    values = values if order is None else values[order]
    half = values.dim() > 1  # norms and biases stay float32
    writer.add_tensor(_name(names, name), values.to(torch.float16 if half else torch.float32).numpy())


def _name(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ExportError(f"gguf: knows no name for {name!r} in this architecture")
    return str(found)


def _describe(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_vocab_size(config.vocab_size)


def _add_tokens(writer: Any, folder: Path, config: Any) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    if told["model"].get("type") != "BPE":
        raise ExportError(f"tokenizer: {told['model'].get('type')} cannot be written, only BPE; leave it out")
    by_id = {i: token for token, i in told["model"]["vocab"].items()}
    special = {t["id"]: t["special"] for t in told.get("added_tokens", [])}
    by_id.update({t["id"]: t["content"] for t in told.get("added_tokens", [])})
    size = max(config.vocab_size, max(by_id) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([5 if i not in by_id else 3 if special.get(i) else 1 for i in range(size)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in told["model"]["merges"]])
    for key, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if isinstance(getattr(config, key, None), int):
            add(getattr(config, key))


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ExportError("gguf is not installed: pip install gguf") from None
    return gguf
