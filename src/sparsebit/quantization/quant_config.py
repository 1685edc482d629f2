"""QuantConfig: every key of the quantization YAML, its default, and the options that exclude each other.

The original left QSCHEME and BIT without a default and refused a file that did not set them. Here every key
has one, so the smallest useful file is a single line.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationInfo, model_validator

from sparsebit.config import Config, PluginConfig, did_you_mean
from sparsebit.config.messages import STARTS_WITH_KEY, show
from sparsebit.config.specific import Overrides, flat, resolve, unmatched, variants
from sparsebit.config.start_observer import is_quantizer_type, with_start
from sparsebit.config.values import Choices, fold, is_text, literal
from sparsebit.errors import ConfigError
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.presets import preset_path, presets
from sparsebit.registry import Registry
from sparsebit.utils.device import Device, default_device

if TYPE_CHECKING:
    from sparsebit.export.backends import Backend

__all__ = [
    "ActivationConfig",
    "QuantConfig",
    "TensorConfig",
    "WeightConfig",
    "json_schema",
    "parse_qconfig",
    "resolve",
    "unmatched",
    "verify_backend",
    "verify_bits",
    "verify_schedule",
]

QScheme = Literal["per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine"]
BUILT_IN = ("virtual", "onnxruntime", "tensorrt", "openvino")


def _known_backend(value: Any) -> Any:
    """A name of the registry of backends, in any spelling. It is loaded only for a name that is not built in."""
    if not isinstance(value, str) or fold(value) in BUILT_IN:
        return fold(value) if isinstance(value, str) else value
    from sparsebit.export.backends import BACKENDS

    names = [*BUILT_IN, *(name for name in BACKENDS if name not in BUILT_IN)]
    if fold(value) not in names:
        raise ConfigError(f"{value!r} is not one of {', '.join(names)}{did_you_mean(value, names)}")
    return fold(value)


BackendName = Annotated[str, BeforeValidator(_known_backend), Choices(BUILT_IN)]
Names = Annotated[list[str], Field(strict=False)]  # a tuple will do
DEFAULT_PRESET = "w8a8"
log = logging.getLogger("sparsebit")


class ScheduleConfig(Config):
    """Passes over the graph. Extra entries switch fusions that users register themselves."""

    fuse_bn: bool = Field(False, description="fold batch norms into the convolution before them")
    bn_tuning: bool = Field(
        False, description="re-estimate batch norms after quantization; keeps them unfused"
    )
    disable_unnecessary_quant: bool = Field(True, description="no quantizer between ops that a backend fuses")
    equalize: bool = Field(
        False, description="balance channels of residual streams and in front of depthwise convolutions"
    )
    bias_correction: bool = Field(
        False, description="shift biases by the mean error that rounded weights cause"
    )

    def verify(self) -> None:
        if self.bn_tuning:  # there is nothing left to tune once batch norms are folded
            self._set("fuse_bn", False)

    @classmethod
    def read_extra(cls, name: str, value: Any, info: ValidationInfo) -> bool:
        """The switch of a task."""
        value = literal(value) if is_text(info) else value
        if not isinstance(value, bool):
            raise ConfigError(f"expected true or false, got {show(value)}")
        return value

    @classmethod
    def is_option(cls, key: str) -> bool:
        return True

    def enabled(self, task: str) -> bool:
        """True if a pass runs. A pass that the config does not mention runs."""
        return bool(self._options().get(self.key(task), True))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        return {**super().json_schema(), "additionalProperties": {"type": "boolean"}}


class QuantizerConfig(PluginConfig):
    type: str = "uniform"
    bit: int = Field(8, ge=1, le=16, description="bits per value")
    disable: bool = Field(False, description="keep these values in float")

    @classmethod
    def registry(cls) -> Registry[Any]:
        from sparsebit.quantization.quantizers import QUANTIZERS_MAP

        return QUANTIZERS_MAP

    @classmethod
    def prepare(cls, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("bit") == 0 and not isinstance(options["bit"], bool):
            warnings.warn(
                "QUANTIZER.BIT: 0 is deprecated; write DISABLE: true", DeprecationWarning, stacklevel=2
            )
            options = {**options, "disable": True}
            del options["bit"]
        return super().prepare(options)


class ObserverConfig(PluginConfig):
    type: str = "minmax"

    @classmethod
    def registry(cls) -> Registry[Any]:
        from sparsebit.quantization.observers import OBSERVERS_MAP

        return OBSERVERS_MAP


class ActivationObserverConfig(ObserverConfig):
    layout: Literal["NCHW", "NLC"] = Field("NCHW", description="where the channels of activations are")


class QAddConfig(Config):
    enable_quant: bool = Field(False, description="quantize the inputs of additions")


class TensorConfig(Config):
    """The common part of W and A: how one kind of tensor is quantized."""

    letter: ClassVar[str] = ""  # its key in the YAML
    target: ClassVar[tuple[QuantTarget, ...]] = ()

    qscheme: QScheme = "per-tensor-affine"
    quantizer: QuantizerConfig = Field(default_factory=QuantizerConfig)
    observer: ObserverConfig = Field(default_factory=ObserverConfig)
    specific: Overrides = Field([], description="overrides per layer: [{pattern: [KEY, value, ...]}]")

    _resolved: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_specific(self) -> TensorConfig:
        for _ in variants(self):  # a typo in a pattern's overrides shows up when the file is read
            pass
        return self

    @classmethod
    def prepare(cls, options: dict[str, Any]) -> dict[str, Any]:
        return with_start(options, options, QuantizerConfig.registry())

    @classmethod
    def is_set_first(cls, path: str) -> bool:
        return is_quantizer_type(path)

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return with_start(
            super()._merged(changes), changes, QuantizerConfig.registry(), before=self.quantizer.type
        )

    def verify(self) -> None:
        for name, section in (("QUANTIZER", self.quantizer), ("OBSERVER", self.observer)):
            check = getattr(section.plugin, "check", None)
            if check is None or self.quantizer.disable:
                continue
            try:
                check(self)
            except ConfigError as error:
                text = str(error).removeprefix(f"{self.letter}.")
                raise ConfigError(text if STARTS_WITH_KEY.match(text) else f"{name}.TYPE: {text}") from None

    def _adopt(self, new: Config) -> None:
        self._resolved.clear()
        super()._adopt(new)


class WeightConfig(TensorConfig):
    letter = "W"
    target = (QuantTarget.WEIGHT,)

    qscheme: QScheme = "per-channel-symmetric"
    group: int | None = Field(
        None,
        ge=1,
        description="values per scale in the weights of Linear layers; null: one scale per channel",
    )
    pair_rule: bool = Field(
        True,
        description="8-bit weights that every x86 CPU multiplies exactly in onnxruntime; false: only for VNNI and ARM",
    )

    def verify(self) -> None:
        super().verify()
        if self.group is not None and not self.qscheme.startswith("per-channel"):
            raise ConfigError(
                f"GROUP: groups are parts of channels; write QSCHEME: per-channel-symmetric instead of {self.qscheme}, "
                f"or GROUP: null"
            )


class ActivationConfig(TensorConfig):
    letter = "A"
    target = (QuantTarget.FEATURE,)

    observer: ActivationObserverConfig = Field(default_factory=ActivationObserverConfig)
    qadd: QAddConfig = Field(default_factory=QAddConfig)
    per_call: bool = Field(
        False, description="a layer that is called several times has an input range per call, not one for all"
    )
    rnn_state: bool = Field(
        False,
        description="round the hidden state of LSTM, GRU and RNN at every step: a loop over time instead of one kernel",
    )


class QuantConfig(Config):
    """All options of a quantization, checked when they are read; docs/config.md lists the keys.

    `QuantConfig.load` takes a YAML file, a mapping or a preset's name; `override("A.OBSERVER.TYPE", "mse")` gives a
    changed copy, `dump()` the YAML. A wrong key or value is a ConfigError that names it and the values that are
    allowed.
    """

    device: Device = Field(default_factory=default_device, description="cpu, cuda, cuda:0, ...")
    backend: BackendName = "virtual"
    skip_trace_modules: Names = Field(
        [], description="patterns of module paths that stay as they are, in float"
    )
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    w: WeightConfig = Field(default_factory=WeightConfig, description="how weights are quantized")
    a: ActivationConfig = Field(default_factory=ActivationConfig, description="how activations are quantized")

    _taken: str = PrivateAttr(default="")

    def verify(self) -> None:
        problems = []
        for check in (verify_bits, verify_backend, verify_schedule):
            try:
                check(self)
            except ConfigError as error:
                problems.append(str(error))
        _raise(problems)

    @classmethod
    def is_set_first(cls, path: str) -> bool:
        return is_quantizer_type(path)

    @classmethod
    def load(cls, source: Any = None) -> QuantConfig:
        """Read a config from a YAML file, a preset by name, a mapping, or a QuantConfig; None is the default preset.

        A file, and a mapping that names a BACKEND, is the whole config. Any other mapping changes the default preset.
        """
        source = DEFAULT_PRESET if source is None else source
        if isinstance(source, Mapping) and not any(str(key).lower() == "backend" for key in source):
            return cls._on_preset(source)
        if isinstance(source, str):
            path = preset_path(source)
            if path is None and not os.path.exists(source):
                hint = did_you_mean(source, presets())
                raise ConfigError(f"{source}: no such file or preset{hint} (presets: {', '.join(presets())})")
            source = path or source
        return super().load(source)

    @classmethod
    def _on_preset(cls, changes: Mapping[str, Any]) -> QuantConfig:
        """The default preset with `changes` on top; a log line reports it."""
        cls._build(changes, draft=True)  # an error names wrong keys in the user's spelling
        config = cls._build(cls.load(DEFAULT_PRESET)._merged(changes))
        pairs = list(flat(changes))
        said = ", ".join(f"{key}: {value}" for key, value in zip(pairs[::2], pairs[1::2]))
        config._taken = f"preset {DEFAULT_PRESET} with {said or 'no changes'}"
        log.info(
            "config: %s; a mapping with a BACKEND would be taken as the whole config instead", config._taken
        )
        return config

    @property
    def taken(self) -> str:
        """The preset that a mapping without BACKEND changed: `preset w8a8 with A.OBSERVER.TYPE: mse`. Otherwise
        empty."""
        return self._taken


def parse_qconfig(cfg_file: Any) -> QuantConfig:
    """Read a YAML file (or a mapping, or a preset by name) into a frozen, checked QuantConfig."""
    return QuantConfig.load(cfg_file)


def json_schema() -> dict[str, Any]:
    """JSON schema of the YAML file, with the options of every registered plug-in."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **QuantConfig.json_schema()}


# -- combinations of options ---------------------------------------------------------------------------
WHAT = {"W": "weights", "A": "activations"}
WHY = {
    "per-tensor-affine": "has no zero points",
    "per-channel-affine": "has no zero points",
    "per-channel-symmetric": "has no scales per channel",
}


def backend_of(cfg: QuantConfig) -> type[Backend]:
    """The backend that a config names."""
    from sparsebit.export.backends import BACKENDS

    return BACKENDS[cfg.backend]


def verify_bits(cfg: QuantConfig) -> None:
    """Raise ConfigError if the backend cannot run that many bits."""
    _raise(
        f"{where}QUANTIZER.BIT: {cfg.backend} runs {WHAT[tensor.letter]} of {_either(allowed)} bits, "
        f"not {tensor.quantizer.bit}; change BIT, or simulate with BACKEND: virtual"
        for where, tensor, allowed in _beyond(cfg, backend_of(cfg).BITS, lambda tensor: tensor.quantizer.bit)
    )


def verify_backend(cfg: QuantConfig) -> None:
    """Raise ConfigError if the backend does not know the scheme."""
    _raise(
        f"{where}QSCHEME: {cfg.backend} {WHY[tensor.qscheme]} for {WHAT[tensor.letter]}; "
        f"write {_either(allowed)} instead of {tensor.qscheme}"
        for where, tensor, allowed in _beyond(cfg, backend_of(cfg).SCHEMES, lambda tensor: tensor.qscheme)
    )


def verify_schedule(cfg: QuantConfig) -> None:
    """Raise ConfigError for passes that cannot work with these options."""
    if cfg.schedule.bn_tuning and not cfg.w.qscheme.startswith("per-channel"):
        raise ConfigError(
            f"SCHEDULE.BN_TUNING: tuning sets the scales of single channels; "
            f"write W.QSCHEME: per-channel-symmetric instead of {cfg.w.qscheme}, or BN_TUNING: false"
        )


def _beyond(
    cfg: QuantConfig, limits: Mapping[str, Sequence[Any]], read: Callable[[TensorConfig], Any]
) -> Iterator[tuple[str, TensorConfig, Sequence[Any]]]:
    """The places where a quantized tensor, by default or by SPECIFIC, is outside the limits of the backend."""
    for base in (cfg.w, cfg.a):
        allowed = limits.get(base.letter)
        if allowed is None:
            continue
        base_is_bad = not base.quantizer.disable and read(base) not in allowed
        if base_is_bad:
            yield f"{base.letter}.", base, allowed
        for where, tensor in variants(base):
            said = base_is_bad and read(tensor) == read(base)
            if not tensor.quantizer.disable and read(tensor) not in allowed and not said:
                yield f"{base.letter}.{where}: ", tensor, allowed


def _either(options: Sequence[Any]) -> str:
    if isinstance(options, range):
        return f"{options[0]} to {options[-1]}"
    return " or ".join(map(str, options))


def _raise(problems: Iterable[str]) -> None:
    lines = list(problems)
    if lines:
        raise ConfigError("\n".join(lines))


def __getattr__(name: str) -> Any:
    """`_C`, the default config, is made on first use: its checks need the plug-ins, which load torch."""
    if name != "_C":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault("_C", QuantConfig())
