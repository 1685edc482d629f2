"""QLoRA in pipeline stages, one per process: the original's finetune_pp.py, on torch.distributed.pipelining.

    torchrun --nproc-per-node 2 finetune_pp.py out/ --data alpaca_data.json --save adapter/ --chunks 4

A micro batch goes through the stages in `chunks` pieces; --batch_size / --micro_batch_size of them make a step.
Rows are padded on the right, where attention is causal and nothing looks, so that stages need no mask.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).resolve().parent))
from finetune import adapted, add_options
from instructions import batch, sequences

from sparsebit.llm import pipeline


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the next tokens' losses: pieces with different numbers of tokens add up."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")


def stage_of(model: Any, args: argparse.Namespace, rank: int, ranks: int) -> tuple[PipelineStage, Any]:
    config = model.get_base_model().config
    stage = pipeline.cut(model, rank, ranks)
    if args.pp_checkpoint != "never":
        stage.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    stage.to(device)
    rows, dtype = args.micro_batch_size // args.chunks, config.dtype or torch.float32
    hidden = torch.empty(
        rows, args.cutoff_len, config.hidden_size, dtype=dtype, device="meta", requires_grad=True
    )
    ids = torch.empty(rows, args.cutoff_len, dtype=torch.long, device="meta")
    logits = torch.empty(rows, args.cutoff_len, config.vocab_size, dtype=dtype, device="meta")
    enters, leaves = (ids if stage.first else hidden), (logits if stage.last else hidden)
    return PipelineStage(stage, rank, ranks, device, input_args=(enters,), output_args=(leaves,)), stage


def train(args: argparse.Namespace, rank: int, ranks: int) -> list[float]:
    from peft import get_peft_model_state_dict
    from transformers import AutoTokenizer

    model = adapted(args.checkpoint, args)
    model.train()
    place, stage = stage_of(model, args, rank, ranks)
    schedule = ScheduleGPipe(place, args.chunks, loss_fn=loss_of, scale_grads=False)
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    rows = sequences(AutoTokenizer.from_pretrained(args.checkpoint), args.data, args.cutoff_len)
    history, micro = [], args.micro_batch_size
    for step in range(args.steps if args.steps > 0 else args.epochs * (len(rows) // args.batch_size)):
        chosen = [rows[(step * args.batch_size + i) % len(rows)] for i in range(args.batch_size)]
        parts = [batch(chosen[i : i + micro], args.cutoff_len) for i in range(0, len(chosen), micro)]
        count, total = sum(int((p["labels"][:, 1:] != -100).sum()) for p in parts), 0.0
        for part in parts:
            losses: list[Tensor] = []
            given = (part["input_ids"].to(place.device),) if stage.first else ()
            target = {"target": part["labels"].to(place.device), "losses": losses} if stage.last else {}
            schedule.step(*given, **target)
            total += sum(float(loss) for loss in losses)
        for p in trained:
            p.grad.div_(count)
        optimizer.step()
        optimizer.zero_grad()
        history.append(total / count)
        if stage.last:
            print(f"step {step + 1} loss {history[-1]:.6f}", flush=True)
    if args.save:
        _save(model, get_peft_model_state_dict(model), args.save, rank, ranks)
    return history


def _save(model: Any, mine: dict[str, Tensor], folder: Path, rank: int, ranks: int) -> None:
    """All adapters in one file, as PEFT writes and reads it."""
    from safetensors.torch import save_file

    gathered: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object({name: tensor.cpu() for name, tensor in mine.items()}, gathered)
    if gathered is not None:
        folder.mkdir(parents=True, exist_ok=True)
        everything = {name: t.contiguous() for part in gathered for name, t in part.items()}
        save_file(everything, folder / "adapter_model.safetensors", {"format": "pt"})
        model.peft_config["default"].save_pretrained(folder)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder that convert.py wrote")
    parser.add_argument("cachedir", nargs="?", help="not needed; kept for old scripts")
    add_options(parser, micro_batch_size=64)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--pp_checkpoint", choices=["always", "except_last", "never"], default="except_last",
                        help="activations are computed again in the backward pass; except_last: as always")  # fmt: skip
    args = parser.parse_args(arguments)
    args.micro_batch_size = min(args.micro_batch_size, args.batch_size)
    if args.micro_batch_size % args.chunks or args.batch_size % args.micro_batch_size:
        parser.error("batch_size must be a multiple of micro_batch_size, and that one of chunks")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        return train(args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
