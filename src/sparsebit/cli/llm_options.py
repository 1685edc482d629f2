"""The options of `sparsebit llm quantize`, in one table: each keyword of `llm.quantize` and of its methods is one row.

An option that is not given is not passed on, so the API decides; a test compares this table with the API.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from sparsebit.cli.terminal.output import InputError

Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="a model as transformers saves it", show_default=False)
]
Text = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="a .txt file, or an .npy file of tokens", show_default=False),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="a .txt file, an .npy file of tokens, or an .npz file of a processor's batch (or a folder of them)",
        show_default=False,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="tokens of a sequence; the usual number is 512, or what the model was made for",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Row:
    """One option: the keyword that it sets, how its text becomes a value, and its line in the help."""

    name: str
    kind: Any  # int, float, str or bool, or a function of the text
    help: str
    methods: str = ""  # those that take it, where it is not a keyword of llm.quantize itself
    flags: tuple[str, ...] = ()
    metavar: str | None = None

    def parameter(self) -> inspect.Parameter:
        """The option in the form of typer; None stands for an option that is not given."""
        if self.kind in (int, float, str, bool):
            plain = self.kind
        else:
            plain = str
        if self.methods:
            text = f"{self.help} ({self.methods})"
        else:
            text = self.help
        panel = "Options of the quantization"
        if self.methods:
            panel = "Options of the methods"
        option = typer.Option(
            *self._flags(), help=text, metavar=self.metavar, show_default=False, rich_help_panel=panel
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[plain | None, option],
        )

    def value(self, given: Any) -> Any:
        """The value for the Python function."""
        if self.kind in (int, float, str, bool):
            return given
        try:
            return self.kind(given)
        except ValueError:
            raise InputError(f"{self._flags()[0]}: expected {self.metavar}, got {given!r}") from None

    def _flags(self) -> tuple[str, ...]:
        name = self.name.replace("_", "-")
        if self.kind is bool:
            usual = f"--{name}/--no-{name}"
        else:
            usual = f"--{name}"
        return self.flags or (usual,)


def _widths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _pattern(text: str) -> tuple[int, int]:
    kept, of = (int(part) for part in text.replace(":", ",").split(","))
    return kept, of


def _place(text: str) -> str | bool:
    return True if text == "tmp" else text


TABLE = (
    Row("method", str, "gptq, awq, rtn, hqq; smoothquant (8-bit activations too); sparsegpt, wanda (zeros)"),
    Row("bits", int, "2, 3, 4 or 8; the usual number is 4, for smoothquant 8"),
    Row("group_size", int, "inputs that share a scale; -1: whole rows"),
    Row(
        "symmetric",
        bool,
        "grids without or with zero points",
        flags=("--symmetric/--asymmetric",),
    ),
    Row("format", str, "compressed-tensors, gptq, int-quantized (8-bit activations), dense (zeros)"),
    Row("candidate_bits", _widths, "a width per layer from these, with --average-bits", metavar="2,3,4"),
    Row("average_bits", float, "what the codes take on average, with --candidate-bits"),
    Row("true_sequential", bool, "a layer sees what the quantized layers before it give"),
    Row("match_float", bool, "aim at the float model's outputs; twice the forward passes"),
    Row("rotate", bool, "turn the residual stream first, so that outliers are spread"),
    Row(
        "towers", _list, "which lists of blocks: encoder,decoder or vision_tower, or all", metavar="NAME,NAME"
    ),
    Row("blocks", str, "the only list of blocks, where it is not found", metavar="PATH.OF.IT"),
    Row("spill", _place, "keep activations in files there; `tmp`: the system's folder", metavar="DIR"),
    Row("reader", str, "the program that must run it: transformers (the usual one), vLLM or GPTQModel"),
    Row("force", bool, "write a checkpoint that its reader does not run, but Sparsebit does"),
    Row("progress", bool, "show bars; the usual way is to show them on terminals"),
    Row("act_order", bool, "inputs that carry much are rounded first", "gptq"),
    Row("static_groups", bool, "groups are runs of inputs; without: a g_idx is written", "gptq"),
    Row("damping", float, "added to the diagonal, as a share of its mean: 0.01", "gptq, sparsegpt"),
    Row("refine", int, "rounds of polishing of codes and scales: 1", "gptq"),
    Row("clip", str, "mse or minmax: how the range of a grid is found", "gptq, awq, rtn, smoothquant"),
    Row("points", int, "scales that are tried for each group of layers: 20", "awq"),
    Row("p", float, "the norm whose error is made small: 0.7", "hqq"),
    Row("rounds", int, "of the search for zero points: 20", "hqq"),
    Row(
        "alpha",
        float,
        "from 0 (ranges stay in the activations) to 1 (all in the weights): 0.5",
        "smoothquant",
    ),
    Row("ratio", float, "the share of zeros: 0.5", "sparsegpt, wanda"),
    Row("pattern", _pattern, "zeros in runs of inputs, such as 2 of 4", "sparsegpt, wanda", metavar="2:4"),
)


def with_table(function: Callable[..., None]) -> Callable[..., None]:
    """The command with every row of the table as an option; `function` gets them in `**given`."""
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    every = [*keywords, *(row.parameter() for row in TABLE)]
    function.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in every} | {"return": None}
    return function


def keywords_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, as keywords of `llm.quantize`."""
    return dict(_given(given))


def _given(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for row in TABLE:
        if given.get(row.name) is not None:
            yield row.name, row.value(given[row.name])
