"""QLoRA: adapters on a packed model, with PEFT and the Trainer of transformers. The original's finetune.py.

  python finetune.py out/ --data alpaca_data.json --save adapter/                       # a folder of convert.py
  python finetune.py model.pth.tar --model_name MODEL --data text.txt --merge merged/   # a file of convert.py

--merge also writes a float checkpoint with the adapters in it. The defaults are the original's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from inputs import Parser, above_zero, check_packages, described_by, load_checkpoint, text_file, tokenizer_of
from instructions import batch, sequences

from sparsebit.errors import ConfigError
from sparsebit.llm.training import qlora


def adapted(checkpoint: Path, described: Path, args: argparse.Namespace) -> Any:
    """The packed model with fresh adapters; the same ones for the same seed."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, task_type="CAUSAL_LM",
        target_modules=args.lora_target_modules,
    )  # fmt: skip
    model = load_checkpoint(checkpoint, described, dtype=getattr(torch, args.dtype) if args.dtype else None)
    torch.manual_seed(args.seed)
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"the adapters cannot be made: {error}") from None


def add_options(parser: Parser, micro_batch_size: int) -> None:
    """What finetune.py and finetune_pp.py share."""
    parser.add_argument("--model_name", help="for a checkpoint in one file: the model it was made from")
    parser.add_argument("--data", type=text_file, default="alpaca_data.json", help="alpaca's JSON, or text")
    parser.add_argument("--save", type=Path, default=Path("adapter"), help="folder for the adapters")
    parser.add_argument("--batch_size", type=above_zero, default=128, help="texts of one step")
    parser.add_argument(
        "--micro_batch_size", type=above_zero, default=micro_batch_size, help="texts at a time"
    )
    parser.add_argument("--epochs", type=above_zero, default=3, help="times that each text is seen")
    parser.add_argument("--steps", type=int, default=-1, help="end after so many steps; -1: after the epochs")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="step size of AdamW")
    parser.add_argument(
        "--cutoff_len", type=above_zero, default=256, help="texts are cut after so many tokens"
    )
    parser.add_argument("--lora_r", type=above_zero, default=8, help="rank of the adapters")
    parser.add_argument(
        "--lora_alpha", type=int, default=16, help="adapters are scaled by lora_alpha / lora_r"
    )
    parser.add_argument("--lora_dropout", type=float, default=0.05, help="dropout in front of the adapters")
    parser.add_argument(
        "--lora_target_modules", nargs="+", default=["q_proj", "v_proj"], help="layers that get an adapter"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of everything that is not packed; if not given, the stored one",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first adapters and the order of the texts"
    )


def main(arguments: list[str] | None = None) -> list[float]:
    parser = Parser("finetune.py", __doc__)
    parser.add_argument("checkpoint", type=Path, help="folder or file that convert.py wrote")
    add_options(parser, micro_batch_size=16)
    parser.add_argument("--checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--merge", type=Path, help="folder for a float model with the adapters merged")
    args = parser.parse_args(arguments)
    with parser.refusing():
        check_packages("peft", "accelerate", extra="qlora")
        return train(args)


def train(args: argparse.Namespace) -> list[float]:
    from transformers import Trainer, TrainingArguments

    described = described_by(args.checkpoint, args.model_name)
    tokenizer = tokenizer_of(described)
    rows = sequences(tokenizer, args.data, args.cutoff_len)
    model = adapted(args.checkpoint, described, args)
    model.print_trainable_parameters()
    micro = min(args.micro_batch_size, args.batch_size)
    settings = TrainingArguments(
        output_dir=str(args.save), per_device_train_batch_size=micro, max_steps=args.steps,
        gradient_accumulation_steps=args.batch_size // micro, num_train_epochs=args.epochs, seed=args.seed,
        learning_rate=args.learning_rate, logging_steps=1, save_strategy="no", report_to=[],
        gradient_checkpointing=args.checkpointing, use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False, gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows, data_collator=batch)
    trainer.train()
    model.save_pretrained(args.save)
    if args.merge:
        merged = qlora.merge(model.eval())
        merged.model.save_pretrained(args.merge)
        tokenizer.save_pretrained(args.merge)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main()
