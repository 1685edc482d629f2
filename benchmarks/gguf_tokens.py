"""A GGUF file in llama.cpp and in transformers, which reads the same file: greedy tokens, and how far logits are apart.

    python benchmarks/gguf_tokens.py smollm2-w4.gguf --text "The capital of France is"

llama.cpp rounds what enters packed layers to 8 bits, in runs of 32. To see whether that is the difference, llama.cpp
also gets a file in which the same weights are float32, so that nothing enters a packed layer; and transformers also
rounds its inputs, once more with embeddings that are changed a little, to see what such a change alone does.
Needs transformers, accelerate, gguf and llama-cpp-python.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.gguf import export_gguf
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


def greedy(model: Any, ids: list[int], new: int) -> list[int]:
    """Also behind the token that ends a text, as the runner of llama.cpp goes on there."""
    found = list(ids)
    for _ in range(new):
        found.append(int(logits(model, found)[-1].argmax()))
    return found[len(ids) :]


def same(a: list[int], b: list[int]) -> int:
    """How many of the first tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def ratio(a: Tensor, b: Tensor) -> str:
    """Signal to difference at each place, in dB; the larger, the more equal."""
    size = (b - b.mean(-1, keepdim=True)).square().sum(-1)
    values = 10 * torch.log10(size / (a - b).square().sum(-1).clamp(min=1e-30))
    return ", ".join(f"{float(v):.0f}" for v in values)


def in_llama_cpp(file: Path, ids: list[int], new: int, model: Any) -> tuple[str, Tensor]:
    """How many tokens are those of transformers, which has the same weights; and the logits."""
    found = ask_llama_cpp(file, prompts=[ids], new=new, every=True)
    equal = same(found["greedy"][0], greedy(model, ids, new)) if new else 0
    theirs = torch.tensor(found["logits"][0])
    return f"{equal} of the first {new} tokens are equal; dB {ratio(theirs, logits(model, ids))}", theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", nargs="+", default=["The capital of France is", "Once upon a time"])
    parser.add_argument("--new", type=int, default=32, help="greedy tokens that are compared")
    asked = parser.parse_args()
    model, tokenizer = read(asked.file)
    texts = {text: tokenizer(text)["input_ids"] for text in asked.text}
    plain = {text: logits(model, ids) for text, ids in texts.items()}
    packed = {}
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder, "float.gguf")
        export_gguf(model, exact, tokenizer=tokenizer, outtype="f32")
        for text, ids in texts.items():
            print(f"{text!r}, {len(ids)} tokens; llama.cpp beside transformers with the same weights:")
            said, packed[text] = in_llama_cpp(asked.file, ids, asked.new, model)
            print(f"  packed, as in the file:   {said}")
            print(f"  the weights as float32:   {in_llama_cpp(exact, ids, asked.new, model)[0]}")
    for layer in packed_layers(asked.file, model):
        layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
    eight = {text: logits(model, ids) for text, ids in texts.items()}
    torch.manual_seed(0)
    table = model.get_input_embeddings().weight.data
    table.mul_(1 + CHANGE * torch.randn_like(table))
    for text, ids in texts.items():
        print(f"{text!r}, dB:")
        print(f"  llama.cpp to transformers with 8-bit inputs:           {ratio(packed[text], eight[text])}")
        print(f"  8-bit inputs in transformers, against float inputs:    {ratio(eight[text], plain[text])}")
        print(
            f"  8-bit inputs, embeddings changed by {CHANGE}, or not:    {ratio(logits(model, ids), eight[text])}"
        )


if __name__ == "__main__":
    main()
