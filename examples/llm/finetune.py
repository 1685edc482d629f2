"""QLoRA: adapters on a packed model, with PEFT and the Trainer of transformers. The original's finetune.py.

    python finetune.py out/ --data alpaca_data.json --save adapter/       # out/ was written by convert.py
    python finetune.py out/ --data text.txt --save adapter/ --merge merged/

--merge also writes a float checkpoint with the adapters in it. The defaults are the original's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from instructions import batch, sequences

from sparsebit import llm
from sparsebit.llm import qlora


def adapted(checkpoint: Path, args: argparse.Namespace) -> Any:
    """The packed model with fresh adapters; the same ones for the same seed."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, task_type="CAUSAL_LM",
        target_modules=args.lora_target_modules,
    )  # fmt: skip
    model = llm.load(checkpoint, dtype=getattr(torch, args.dtype) if args.dtype else None)
    torch.manual_seed(args.seed)
    return get_peft_model(model, config)


def add_options(parser: argparse.ArgumentParser, micro_batch_size: int) -> None:
    """What finetune.py and finetune_pp.py share."""
    parser.add_argument("--data", type=Path, required=True, help="alpaca's JSON, or text")
    parser.add_argument("--save", type=Path, help="folder for the adapters")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--micro_batch_size", type=int, default=micro_batch_size)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=-1, help="stop after so many, instead of after the epochs"
    )
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--cutoff_len", type=int, default=256)
    parser.add_argument("--lora_r", type=int, default=8)
    parser.add_argument("--lora_alpha", type=int, default=16)
    parser.add_argument("--lora_dropout", type=float, default=0.05)
    parser.add_argument("--lora_target_modules", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="as stored if not said")
    parser.add_argument("--seed", type=int, default=0)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder that convert.py wrote")
    add_options(parser, micro_batch_size=16)
    parser.add_argument("--checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--merge", type=Path, help="folder for a float model with the adapters merged")
    args = parser.parse_args(arguments)

    from transformers import AutoTokenizer, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = adapted(args.checkpoint, args)
    model.print_trainable_parameters()
    micro = min(args.micro_batch_size, args.batch_size)
    settings = TrainingArguments(
        output_dir=str(args.save or "adapter"), per_device_train_batch_size=micro, max_steps=args.steps,
        gradient_accumulation_steps=args.batch_size // micro, num_train_epochs=args.epochs, seed=args.seed,
        learning_rate=args.learning_rate, logging_steps=1, save_strategy="no", report_to=[],
        gradient_checkpointing=args.checkpointing, use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False, gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    trainer = Trainer(
        model, settings, train_dataset=sequences(tokenizer, args.data, args.cutoff_len), data_collator=batch
    )
    trainer.train()
    if args.save:
        model.save_pretrained(args.save)
    if args.merge:
        merged = qlora.merge(model.eval())
        merged.model.save_pretrained(args.merge)
        tokenizer.save_pretrained(args.merge)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main()
