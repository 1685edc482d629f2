"""How many inputs share a scale. Readers run whole groups only, so a size counts where it divides a layer's inputs.

Where nothing is asked for, every layer gets the largest of 128, 64 and 32 that divides its inputs, and whole rows where
none does. A format with one size for all layers gets the largest one that fits all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparsebit.errors import ConfigError

SIZES = (128, 64, 32)
ROWS = -1  # one scale per row
LEFT_OUT = 0.05  # of all weights


def group_sizes(
    inputs: Mapping[str, int],
    asked: int | None,
    *,
    weights: Mapping[str, int] | None = None,
    one_for_all: bool = False,
    alike: Iterable[Iterable[str]] = (),
    force: bool = False,
) -> dict[str, int]:
    """The size for every layer; a few small layers that the user's size does not fit are left out.

    inputs       of each layer.
    asked        the user's size; None: what fits.
    weights      of each layer, where layers may be left out.
    one_for_all  the format has a single size.
    alike        sets of layers that have to have the same size, such as experts.
    force        take a size that does not fit: `llm.load` runs short groups, other programs do not.
    """
    if asked is not None:
        if force:
            fit = list(inputs)
        else:
            fit = [name for name in inputs if asked < 1 or inputs[name] % asked == 0]
        if weights is None or sum(weights[name] for name in fit) < (1 - LEFT_OUT) * sum(weights.values()):
            check_fit({name: inputs[name] for name in inputs if not force}, asked)
        return dict.fromkeys(fit, asked)
    if one_for_all:
        return dict.fromkeys(inputs, largest_fit(inputs.values()))
    found = {name: largest_fit([width]) for name, width in inputs.items()}
    for names in alike:
        names = list(names)
        found.update(dict.fromkeys(names, largest_fit(inputs[name] for name in names)))
    return found


def nearly_all(inputs: Mapping[str, int], weights: Mapping[str, int]) -> dict[str, int]:
    """One size for all layers but a few small ones, which are left out; whole rows where too many would be."""
    total = sum(weights.values())
    for size in SIZES:
        fit = [name for name, width in inputs.items() if width % size == 0]
        if sum(weights[name] for name in fit) >= (1 - LEFT_OUT) * total:
            return dict.fromkeys(fit, size)
    return dict.fromkeys(inputs, ROWS)


def largest_fit(widths: Iterable[int]) -> int:
    """The largest usual size that divides all of `widths`."""
    widths = set(widths)
    return next((size for size in SIZES if all(width % size == 0 for width in widths)), ROWS)


def check_fit(inputs: Mapping[str, int], size: int) -> None:
    """Refuses a size that leaves a short group in some layer, and names the sizes that leave none."""
    if size == ROWS:
        return
    if size < 1:
        raise ConfigError(f"group_size: must be a positive number, or -1 for whole rows, got {size}")
    wrong = [name for name, width in inputs.items() if width % size]
    if not wrong:
        return
    widths = set(inputs.values())
    fits = []
    for n in (256, *SIZES, 16):
        if all(width % n == 0 for width in widths):
            fits.append(str(n))
    raise ConfigError(
        f"group_size: {wrong[0]} has {inputs[wrong[0]]} inputs, which is not a multiple of {size}"
        f"{f' ({len(wrong)} layers in all)' if len(wrong) > 1 else ''}, and readers run whole groups only; "
        f"leave group_size out, or use {', '.join([*fits, '-1 (whole rows)'])}"
    )
