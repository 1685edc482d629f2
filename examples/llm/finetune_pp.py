"""QLoRA in pipeline stages, one per process: the original's finetune_pp.py, on torch.distributed.pipelining.

  python finetune_pp.py out/ cache/ --data alpaca_data.json                          # a folder of convert.py
  python finetune_pp.py model.pth.tar cache/ --model_name MODEL --data text.txt      # a file of convert.py
  python finetune_pp.py MODEL cache/ --data alpaca_data.json                         # a float model

It starts one process for each GPU, or --stages of them; `torchrun --nproc-per-node 2 finetune_pp.py ...` works too.
cachedir holds what is downloaded. A float model is packed there once, to 4 bits by rounding; convert.py does it better.
A micro batch goes through the stages in `chunks` pieces; --batch_size / --micro_batch_size of them make a step.
Rows are padded on the right, where attention is causal and nothing looks, so that stages need no mask.
"""

from __future__ import annotations

import argparse
import json
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
from inputs import Parser, above_zero, check_packages, described_by, model_folder, tokenizer_of
from instructions import batch, sequences

from sparsebit import llm
from sparsebit.errors import ConfigError
from sparsebit.llm.training import pipeline


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


def is_packed(folder: Path) -> bool:
    return "quantization_config" in json.loads((folder / "config.json").read_text())


def find(args: argparse.Namespace) -> tuple[Path, Path]:
    """The model, and the folder with its config and tokenizer."""
    model = Path(args.model)
    if model.is_file():
        return model, described_by(model, args.model_name, args.cachedir)
    folder = model_folder(args.model, args.cachedir)
    if not is_packed(folder) and args.cachedir is None:
        raise ConfigError(
            f"{model}: is a float model; quantize it with convert.py, or name a cachedir to pack it in"
        )
    return folder, folder


def check(args: argparse.Namespace) -> None:
    """Refuses here what every process would refuse after it has loaded the model."""
    described = find(args)[1]
    sequences(tokenizer_of(described), args.data, args.cutoff_len)
    blocks = json.loads((described / "config.json").read_text()).get("num_hidden_layers", args.stages)
    if args.stages > blocks:
        raise ConfigError(f"--stages {args.stages}: the model has {blocks} blocks; start fewer processes")


def packed(folder: Path, args: argparse.Namespace, rank: int) -> Path:
    """The folder of the packed model; process 0 makes it where it is missing."""
    if is_packed(folder):
        return folder
    cached: Path = args.cachedir / f"{Path(args.model).name}-w4"
    if rank == 0:
        print(f"{args.model} is a float model: packed to 4 bits in {cached}", flush=True)
        llm.quantize(folder, method="rtn", bits=4, save=cached, progress=False)
    dist.barrier()
    return cached


def train(args: argparse.Namespace, rank: int, ranks: int) -> list[float]:
    from peft import get_peft_model_state_dict

    checkpoint, described = find(args)
    if checkpoint.is_dir():
        checkpoint = packed(checkpoint, args, rank)
    rows = sequences(tokenizer_of(described), args.data, args.cutoff_len)
    model = adapted(checkpoint, described, args)
    model.train()
    place, stage = stage_of(model, args, rank, ranks)
    schedule = ScheduleGPipe(place, args.chunks, loss_fn=loss_of, scale_grads=False)
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    history, micro = [], args.micro_batch_size
    steps = args.epochs * -(-len(rows) // args.batch_size) if args.steps < 1 else args.steps
    for step in range(steps):
        chosen = [rows[(step * args.batch_size + i) % len(rows)] for i in range(args.batch_size)]
        parts = [batch(chosen[i : i + micro], args.cutoff_len) for i in range(0, len(chosen), micro)]
        count, total = sum(int((p["labels"][:, 1:] != -100).sum()) for p in parts), 0.0
        for part in parts:
            losses: list[Tensor] = []
            given = (part["input_ids"].to(place.device),) if stage.first else ()
            target = {"target": part["labels"].to(place.device), "losses": losses} if stage.last else {}
            schedule.step(*given, **target)
            total += sum(float(loss.detach()) for loss in losses)
        for p in trained:
            p.grad.div_(count)
        optimizer.step()
        optimizer.zero_grad()
        history.append(total / count)
        if stage.last:
            print(f"step {step + 1} loss {history[-1]:.6f}", flush=True)
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


def start(arguments: list[str], stages: int) -> None:
    """This script again, in one process per stage."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", "--nproc-per-node", str(stages), str(Path(__file__).resolve()), *arguments])
    except ChildFailedError:
        raise SystemExit(1) from None  # the process has said why


def main(arguments: list[str] | None = None) -> list[float] | None:
    """The losses of this process; None where it only started the others."""
    parser = Parser("finetune_pp.py", __doc__)
    parser.add_argument(
        "model", help="folder or file that convert.py wrote, or a float model (folder, or Hub name)"
    )
    parser.add_argument("cachedir", type=Path, nargs="?", help="folder for downloads and packed float models")
    add_options(parser, micro_batch_size=64)
    parser.add_argument(
        "--chunks", type=above_zero, default=4, help="pieces of a micro batch in the pipeline"
    )
    parser.add_argument("--pp_checkpoint", choices=["always", "except_last", "never"], default="except_last",
                        help="compute activations again in the backward pass; except_last: as always")  # fmt: skip
    parser.add_argument("--stages", type=above_zero, default=max(torch.cuda.device_count(), 1),
                        help="processes to start; under torchrun its own number counts")  # fmt: skip
    args = parser.parse_args(arguments)
    args.micro_batch_size = min(args.micro_batch_size, args.batch_size)
    if args.micro_batch_size % args.chunks or args.batch_size % args.micro_batch_size:
        parser.error("batch_size must be a multiple of micro_batch_size, and that one of chunks")
    with parser.refusing():
        check_packages("peft", extra="qlora")
        if "RANK" not in os.environ:
            check(args)
            start(sys.argv[1:] if arguments is None else arguments, args.stages)
            return None
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        try:
            return train(args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
