"""A GGUF file in llama.cpp and in transformers, which reads the same file: greedy tokens, and how far logits are apart.

    python benchmarks/gguf_tokens.py smollm2-w4.gguf --text "The capital of France is"

llama.cpp rounds what enters packed layers to 8 bits, in runs of 32. The same is done in transformers, to see whether
that is the difference; and once more with embeddings that are changed a little, to see what such a change alone does.
Needs transformers, accelerate, gguf and llama-cpp-python.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.gguf.runner import ask_llama_cpp

CHANGE = 1e-5  # of the embeddings


def read(path: Path) -> tuple[Any, Any]:
    """The model and the tokenizer, by transformers' own reader."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def packed_layers(path: Path, model: nn.Module) -> list[nn.Module]:
    """Every Linear layer but the head, where the file has one that is packed."""
    import gguf

    kinds = {t.tensor_type.name for t in gguf.GGUFReader(str(path)).tensors if t.name.startswith("blk.")}
    packed = any(kind.startswith("Q") for kind in kinds)
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    return linears if packed else []


def rounded(x: Tensor) -> Tensor:
    """Q8_0: of each run of 32 numbers a scale, which is kept in half precision, and 8-bit integers."""
    runs = x.unflatten(-1, (-1, 32))
    scale = runs.abs().amax(-1, keepdim=True) / 127
    levels = torch.round(runs / scale.where(scale > 0, 1.0))
    return (levels * scale.half().float()).flatten(-2)


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([ids])).logits[0].float()
    return found


@torch.no_grad()
def greedy(model: Any, ids: list[int], new: int) -> list[int]:
    settings = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
    given = torch.tensor([ids])
    found = model.generate(given, attention_mask=torch.ones_like(given), pad_token_id=0, **settings)
    return list(found[0, len(ids) :].tolist())


def same(a: list[int], b: list[int]) -> int:
    """How many of the first tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def ratio(a: Tensor, b: Tensor) -> str:
    """Signal to difference at each place, in dB; the larger, the more equal."""
    size = (b - b.mean(-1, keepdim=True)).square().sum(-1)
    values = 10 * torch.log10(size / (a - b).square().sum(-1).clamp(min=1e-30))
    return ", ".join(f"{float(v):.0f}" for v in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", default="The capital of France is")
    parser.add_argument("--new", type=int, default=32, help="greedy tokens that are compared")
    asked = parser.parse_args()
    model, tokenizer = read(asked.file)
    ids = tokenizer(asked.text)["input_ids"]
    found = ask_llama_cpp(asked.file, prompts=[ids], new=asked.new, every=True)
    theirs = torch.tensor(found["logits"][0])
    plain = logits(model, ids)
    if asked.new:
        equal = same(found["greedy"][0], greedy(model, ids, asked.new))
        print(f"llama.cpp {found['version']}: {equal} of the first {asked.new} tokens are equal")
    print(f"logits at each of {len(ids)} places, in dB: llama.cpp to transformers {ratio(theirs, plain)}")
    for layer in packed_layers(asked.file, model):
        layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
    eight = logits(model, ids)
    print(f"with 8-bit activations in transformers: {ratio(theirs, eight)}")
    torch.manual_seed(0)
    table = model.get_input_embeddings().weight.data
    table.mul_(1 + CHANGE * torch.randn_like(table))
    print(
        f"these, before and after a change of the embeddings by {CHANGE}: {ratio(logits(model, ids), eight)}"
    )


if __name__ == "__main__":
    main()
