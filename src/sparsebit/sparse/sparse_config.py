"""SparseConfig: `SPARSER: {TYPE: structured, STRATEGY: l1norm, RATIO: 0.5}`."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator

from sparsebit.config import Config, PluginConfig, fold
from sparsebit.config.specific import Overrides, resolve, unmatched, variants
from sparsebit.errors import ConfigError
from sparsebit.registry import Registry
from sparsebit.utils.device import Device, default_device

__all__ = ["SparseConfig", "SparserConfig", "parse_sconfig", "resolve", "unmatched"]

Kind = Literal["structured", "unstructured"]
Heads = Literal["whole", "dimension"]
PATTERN = r"^[1-9][0-9]*:[1-9][0-9]*$"
OF_ALL = ("type", "scope", "round_to", "heads", "refit")  # options for the whole model only
OLD_NAMES = {"structed": "structured", "unstructed": "unstructured", "l0norm": "l0"}  # names of the original


class Spelling(str):
    """A current name that also equals the original's name: old plug-ins ask `TYPE == "structed"`."""

    def __eq__(self, other: object) -> bool:
        return str(self) == (OLD_NAMES.get(other, other) if isinstance(other, str) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _today(value: Any, known: Registry[Any]) -> Any:
    """The current name of a kind or a strategy; names of plug-ins do not change."""
    if not isinstance(value, str):
        return value
    name = fold(value)
    if name in known:
        return name
    return OLD_NAMES.get(name.replace("-", ""), name)


class SparserConfig(PluginConfig):
    letter: ClassVar[str] = "SPARSER"
    selector: ClassVar[str] = "strategy"

    type: Kind = Field("structured", description="whole channels, or single weights")
    strategy: str = Field("l1norm", description="what decides which of them matter least")
    ratio: float = Field(0.0, ge=0, le=1, description="the share that goes")
    scope: Literal["layer", "global"] = Field(
        "layer", description="the share goes from every layer, or from all of them together"
    )
    pattern: str | None = Field(
        None,
        pattern=PATTERN,
        description='unstructured: "2:4" keeps two of every four weights along the input',
    )
    round_to: int = Field(
        1,
        ge=0,
        description="structured: layers keep the nearest multiple of so many channels; 0: of 8, those with 16 or more",
    )
    heads: Heads = Field(
        "whole", description="structured, of attention: a head goes, or the same dimension of every head"
    )
    refit: bool = Field(
        True, description="structured, with batches: layers behind a cut compensate the removed inputs"
    )
    specific: Overrides = Field([], description="overrides per layer: [{pattern: [KEY, value, ...]}]")

    _resolved: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def registry(cls) -> Registry[Any]:
        from sparsebit.sparse.sparsers import SPARSERS_MAP

        return SPARSERS_MAP

    @classmethod
    def prepare(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The notes of the original swap the values of TYPE and STRATEGY; both orders are accepted."""
        kind, strategy = (
            _today(value, cls.registry())
            for value in (options.pop("type", None), options.pop("strategy", None))
        )
        if kind not in get_args(Kind) and (strategy in get_args(Kind) or kind in cls.registry()):
            kind, strategy = strategy, kind
        found = {"type": kind, "strategy": strategy}
        return super().prepare(
            {**options, **{key: value for key, value in found.items() if value is not None}}
        )

    def __getattr__(self, name: str) -> Any:
        if name == "TYPE":
            return Spelling(self.type)
        return super().__getattr__(name)

    @field_validator("pattern", mode="before")
    @classmethod
    def _read_pattern(cls, value: Any) -> Any:
        """Undo YAML, which reads 2:4 without quotes as minutes and seconds: 124."""
        if type(value) is int and value >= 60:
            value = f"{value // 60}:{value % 60}"
        if value is not None and not (isinstance(value, str) and re.match(PATTERN, value)):
            raise ValueError(f'expected N:M such as "2:4", got {value!r}')
        return value

    @model_validator(mode="after")
    def _check_specific(self) -> SparserConfig:
        for _ in variants(self):  # finds a typo in the overrides of SPECIFIC when the file is read
            pass
        return self

    def verify(self) -> None:
        if self.type not in self.plugin.KINDS:
            raise ConfigError(
                f"STRATEGY: {self.strategy} prunes {' and '.join(self.plugin.KINDS)}; write "
                f"TYPE: {self.plugin.KINDS[0]}, or another STRATEGY"
            )
        self._verify_specific()
        if self.pattern is None:
            return
        if self.type == "structured":
            raise ConfigError("PATTERN: is about single weights; write TYPE: unstructured, or PATTERN: null")
        n, m = map(int, self.pattern.split(":"))
        if n > m:
            raise ConfigError(f"PATTERN: {self.pattern} would keep {n} of {m}; write {m}:{n}?")

    def _verify_specific(self) -> None:
        """Refuse overrides that would have no effect."""
        rules = [dict(zip(pairs[::2], pairs[1::2])) for rule in self.specific for pairs in rule.values()]
        has_pattern = any([self.pattern, *(rule.get("PATTERN") for rule in rules)])
        for (where, alone), rule in zip(variants(self), rules):
            for option in OF_ALL:
                if getattr(alone, option) != getattr(self, option):
                    raise ConfigError(
                        f"{where}: {option.upper()} belongs to the whole model; write it above SPECIFIC"
                    )
            if "RATIO" in rule and rule.get("PATTERN", has_pattern):
                raise ConfigError(
                    f"{where}: RATIO has no effect beside PATTERN; "
                    f"write [PATTERN, null, RATIO, ...], and RATIO 0 for a layer that stays whole"
                )

    def _adopt(self, new: Config) -> None:
        self._resolved.clear()
        super()._adopt(new)


class SparseConfig(Config):
    device: Device = Field(default_factory=default_device, description="cpu, cuda, cuda:0, ...")
    sparser: SparserConfig = Field(default_factory=SparserConfig)

    def verify(self) -> None:
        """Overrides are checked here and not in the section: there, RATIO of all layers may stand beside
        PATTERN of one layer."""
        ratio = self.sparser.ratio
        pattern = self.sparser.pattern
        if pattern and ratio and not math.isclose(ratio, 1 - Fraction(pattern.replace(":", "/"))):
            raise ConfigError(
                f"SPARSER.RATIO: is {ratio}, but PATTERN {pattern} decides how much is removed; leave out one"
            )


def parse_sconfig(cfg_file: Any) -> SparseConfig:
    """Read a YAML file or a mapping into a frozen, checked SparseConfig."""
    return SparseConfig.load(cfg_file)


def __getattr__(name: str) -> Any:
    """`_C`, the default config, is made on first use: the choice of a device loads torch."""
    if name != "_C":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault("_C", SparseConfig())
