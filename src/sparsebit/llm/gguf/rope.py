"""Rotary positions: the base, how many values of a head are turned, and how the frequencies were stretched."""

from __future__ import annotations

from typing import Any

from sparsebit.errors import ExportError
from sparsebit.llm.gguf.items import Item, of_tensor

# architectures that read rope_freqs
WITH_FACTORS = ("llama", "granite", "granitemoe", "arcee", "apertus", "exaone4")


def rope_of(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """`rope_parameters` of the layers that see everything, or of those with a window."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(layers, rope)
    base = rope.get("rope_theta", getattr(config, "rope_theta", None))
    return {**rope, "rope_theta": 10000.0 if base is None else base}


def turned(config: Any, head: int) -> int:
    """The number of values of a head that are turned."""
    share = rope_of(config).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return head if share is None else int(head * share)


def rope_keys(config: Any, head: int) -> dict[str, Any]:
    rope = rope_of(config)
    found: dict[str, Any] = {
        "rope.dimension_count": turned(config, head),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    window = rope_of(config, "sliding_attention")["rope_theta"]
    if float(window) != found["rope.freq_base"]:
        found["rope.freq_base_swa"] = float(window)
    return found | scaling(config, rope)


def scaling(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # llama3: a tensor holds the factors; dynamic: only beyond the context
    if kind in ("default", "llama3", "dynamic"):
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind == "yarn":
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": int(original),
        }
    raise ExportError(
        f"gguf: rotary positions of the type {kind!r} cannot be written; there are: default, linear, dynamic, "
        "llama3, yarn"
    )


def rope_tensors(config: Any, name: str) -> list[tuple[str, Item]]:
    """The divisors of llama3's stretched frequencies."""
    rope = rope_of(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "llama3":
        return []
    if name not in WITH_FACTORS:
        raise ExportError(f"gguf: llama.cpp's {name} cannot hold rotary positions of the type 'llama3'")
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = 2 * len(stretched)
    plain = float(rope["rope_theta"]) ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    return [("rope_freqs.weight", of_tensor((plain / stretched.double()).float()))]
