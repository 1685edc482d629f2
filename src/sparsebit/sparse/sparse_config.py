"""SparseConfig: `SPARSER: {TYPE: structured, STRATEGY: l1norm, RATIO: 0.5}`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field

from sparsebit.config import Config, fold
from sparsebit.utils.device import Device, default_device

__all__ = ["SparseConfig", "SparserConfig", "parse_sconfig"]

Kind = Literal["structured", "unstructured"]
Strategy = Literal["l1norm"]  # the registry of sparsers takes over when structured pruning lands
OLD_KINDS = {"structed": "structured", "unstructed": "unstructured"}  # the original's spelling


class SparserConfig(Config):
    type: Kind = Field("structured", description="whole channels, or single weights")
    strategy: Strategy = Field("l1norm", description="what decides which of them matter least")
    ratio: float = Field(0.0, ge=0, le=1, description="the share that goes")

    @classmethod
    def prepare(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The original's notes have the values of TYPE and STRATEGY the other way round: take both orders."""
        kind, strategy = (
            OLD_KINDS.get(fold(value), fold(value)) if isinstance(value, str) else value
            for value in (options.pop("type", None), options.pop("strategy", None))
        )
        if kind not in get_args(Kind) and (strategy in get_args(Kind) or kind in get_args(Strategy)):
            kind, strategy = strategy, kind
        found = {"type": kind, "strategy": strategy}
        return {**options, **{key: value for key, value in found.items() if value is not None}}


class SparseConfig(Config):
    device: Device = Field(default_factory=default_device, description="cpu, cuda, cuda:0, ...")
    sparser: SparserConfig = Field(default_factory=SparserConfig)


def parse_sconfig(cfg_file: Any) -> SparseConfig:
    """Read a YAML file or a mapping into a frozen, checked SparseConfig."""
    return SparseConfig.load(cfg_file)


def __getattr__(name: str) -> Any:
    """`_C`, the default config, is made on first use: choosing a device loads torch."""
    if name != "_C":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault("_C", SparseConfig())
