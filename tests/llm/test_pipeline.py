"""Models cut into pipeline stages: run one after the other, the stages are the model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.llm.training.pipeline import cut

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install sparsebit[llm])", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
__import__("zoo_shim").install()
transformers = importlib.import_module("transformers")

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def build(kind: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "kind, changes",
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Mistral", {"sliding_window": 8}),
        ("Gemma2", {"head_dim": 16, "sliding_window": 8}),
    ],
)
def test_stages_in_a_row_are_the_model(kind, changes, ranks):
    ids = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    expected, x = build(kind, **changes)(ids).logits, ids
    weights = []
    for rank in range(ranks):
        stage = cut(build(kind, **changes), rank, ranks)
        weights.append(sum(p.numel() for n, p in stage.named_parameters() if "layers" in n))
        x = stage(x)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)
    whole = sum(p.numel() for n, p in build(kind, **changes).named_parameters() if "layers" in n)
    assert sum(weights) == whole  # every block is somewhere, once


def test_names_stay():
    stage = cut(build("Llama"), 1, 3)
    names = {name for name, _ in stage.model.named_parameters() if "layers" in name}
    assert names and all(name.startswith("model.layers.1.") for name in names)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="3 blocks cannot be cut into 4"):
        cut(build("Llama"), 0, 4)
    with pytest.raises(ConfigError, match="no decoder"):
        cut(nn.Linear(2, 2), 0, 2)
    model = build("Llama")
    forward = model.model.forward
    model.model.forward = lambda inputs_embeds, **kwargs: forward(inputs_embeds=2 * inputs_embeds, **kwargs)
    with pytest.raises(ConfigError, match="beside its blocks"):
        cut(model, 0, 2)
