"""QuantConfig: what is refused, with which words; old spellings; which options go together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from sparsebit.config import Config
from sparsebit.errors import ConfigError
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.observers import OBSERVERS_MAP
from sparsebit.quantization.quant_config import (
    _C,
    QuantConfig,
    verify_backend,
    verify_bits,
    verify_schedule,
)
from sparsebit.quantization.quantizers import QUANTIZERS_MAP

SYMMETRIC = ("per-tensor-symmetric", "per-channel-symmetric")
NO_ZERO = "tensorrt has no zero points"
AFFINE_A = f"A.QSCHEME: {NO_ZERO} for activations; write {SYMMETRIC[0]} instead of per-tensor-affine"
SIMULATE = "change BIT, or simulate with BACKEND: virtual"


def message(data: Any) -> str:
    with pytest.raises(ConfigError) as error:
        QuantConfig.load(data)
    return str(error.value)


# -- errors ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"W": {"QUANTIZER": {"BITS": 4}}}, "W.QUANTIZER.BITS: unknown option; did you mean BIT?"),
        (
            {"W": {"QSCHEME": "per-chanel-symmetric"}},
            "W.QSCHEME: 'per-chanel-symmetric' is not one of per-tensor-symmetric, per-tensor-affine, "
            "per-channel-symmetric, per-channel-affine; did you mean per-channel-symmetric?",
        ),
        ({"A": {"QUANTIZER": {"BIT": "four"}}}, "A.QUANTIZER.BIT: expected an integer, got 'four'"),
        ({"A": {"QUANTIZER": {"BIT": -1}}}, "A.QUANTIZER.BIT: must be greater than or equal to 1, got -1"),
        ({"A": {"QUANTIZER": {"BIT": False}}}, "A.QUANTIZER.BIT: expected an integer, got False"),
        (
            {"A": {"OBSERVER": {"PERCENTILE": {"ALPHAA": 1}}}},
            "A.OBSERVER.PERCENTILE.ALPHAA: unknown option; did you mean ALPHA?",
        ),
        (
            {"A": {"OBSERVER": {"PERCENTIL": {"ALPHA": 1}}}},
            "A.OBSERVER.PERCENTIL: unknown option; did you mean PERCENTILE?",
        ),
        ({"W": {"OBSERVER": {"LAYOUT": "NCHW"}}}, "W.OBSERVER.LAYOUT: unknown option; options are TYPE, "),
        ({"W": {"QADD": {}}}, "W.QADD: unknown option; options are QSCHEME, QUANTIZER, OBSERVER, SPECIFIC"),
        (
            {"BACKEND": "tensort"},
            "BACKEND: 'tensort' is not one of virtual, onnxruntime, tensorrt, openvino; did you",
        ),
        ({"DEVICE": "gpux"}, "DEVICE: 'gpux' is not a torch device; write cpu, cuda or cuda:0"),
        ({"SCHEDULE": {"MY_FUSION": 1}}, "SCHEDULE.MY_FUSION: expected true or false, got 1"),
        ({"SKIP_TRACE_MODULES": "blocks"}, "SKIP_TRACE_MODULES: expected a list, got 'blocks'"),
        (
            {"A": {"QSCHEME": "per-channel-affine", "QUANTIZER": {"TYPE": "pact"}}},
            "A.QSCHEME: pact needs a per-tensor scheme, got per-channel-affine",
        ),
        ({"A": {"QUANTIZER": {"TYPE": "adaround"}}}, "A.QUANTIZER.TYPE: adaround is for weights"),
    ],
)
def test_error_messages(data, expected) -> None:
    assert message(data).startswith(expected)
    assert "\n" not in message(data)


def test_a_disabled_quantizer_is_not_checked_against_the_scheme() -> None:
    QuantConfig.load({"A": {"QSCHEME": "per-channel-affine", "QUANTIZER": {"TYPE": "pact", "DISABLE": True}}})


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("LSQ", "lsq"),
        ("LSQ_plus", "lsq+"),
        ("lsq+", "lsq+"),
        ("lsq-Plus", "lsq+"),
        ("DoReFa", "dorefa"),
        ("PACT", "pact"),
        ("Uniform", "uniform"),
    ],
)
def test_D28_type_in_any_letter_case(name, plain) -> None:
    cfg = QuantConfig.load({"A": {"QUANTIZER": {"TYPE": name}}})
    assert plain == cfg.A.QUANTIZER.TYPE
    assert cfg.a.quantizer.plugin is QUANTIZERS_MAP[plain]
    assert QuantConfig.load({"A": {"OBSERVER": {"TYPE": "Kl_Histogram"}}}).A.OBSERVER.TYPE == "kl_histogram"


def test_D38_pact_alpha_may_be_an_integer_or_a_float() -> None:
    for value in (6, 6.0):
        alpha = QuantConfig.load(
            {"A": {"QUANTIZER": {"PACT": {"ALPHA_VALUE": value}}}}
        ).A.QUANTIZER.PACT.ALPHA_VALUE
        assert alpha == 6.0
        assert isinstance(alpha, float)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"OBSERVER": {"TYPE": "minmx"}},
            "A.OBSERVER.TYPE: 'minmx' is not a registered observer; did you mean minmax?",
        ),
        (
            {"QUANTIZER": {"TYPE": "lsqq"}},
            "A.QUANTIZER.TYPE: 'lsqq' is not a registered quantizer; did you mean lsq?",
        ),
        (
            {"OBSERVER": {"LAYOUT": "NCWH"}},
            "A.OBSERVER.LAYOUT: 'NCWH' is not one of NCHW, NLC; did you mean NCHW?",
        ),
    ],
)
def test_D38_typos_in_values_are_refused_when_the_file_is_read(data, expected) -> None:
    assert message({"A": data}) == expected


def test_bit_0_disables_and_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match=r"QUANTIZER\.BIT: 0 is deprecated; write DISABLE: true"):
        cfg = QuantConfig.load({"BACKEND": "virtual", "A": {"QUANTIZER": {"BIT": 0}}})
    assert cfg.A.QUANTIZER.DISABLE is True
    assert cfg.W.QUANTIZER.DISABLE is False
    edited = _C.clone()
    edited.defrost()
    with pytest.warns(DeprecationWarning):
        edited.A.QUANTIZER.BIT = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        edited.freeze()  # said once is enough
    assert edited == cfg


def test_users_own_plugin_brings_its_options() -> None:
    @OBSERVERS_MAP.register("test_only")
    class Mine:
        class Params(Config):
            window: int = 5

        @classmethod
        def check(cls, cfg: Any) -> None:
            if QuantTarget.WEIGHT in cfg.target:
                raise ConfigError("only watches activations")

    try:
        cfg = QuantConfig.load({"A": {"OBSERVER": {"TYPE": "Test_Only", "TEST_ONLY": {"WINDOW": 7}}}})
        assert cfg.a.observer.params().window == cfg.A.OBSERVER.TEST_ONLY.WINDOW == 7
        assert (
            message({"W": {"OBSERVER": {"TYPE": "test_only"}}}) == "W.OBSERVER.TYPE: only watches activations"
        )
    finally:
        del OBSERVERS_MAP._items["test_only"]


# -- which options go together ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"BACKEND": "tensorrt"},
            [AFFINE_A],
        ),
        (
            {"BACKEND": "tensorrt", "A": {"QSCHEME": SYMMETRIC[1]}, "W": {"QSCHEME": "per-channel-affine"}},
            [
                f"W.QSCHEME: {NO_ZERO} for weights; write per-channel-symmetric or per-tensor-symmetric "
                "instead of per-channel-affine",
                "A.QSCHEME: tensorrt has no scales per channel for activations; write per-tensor-symmetric "
                "instead of per-channel-symmetric",
            ],
        ),
        (
            {
                "BACKEND": "tensorrt",
                "A": {"QSCHEME": SYMMETRIC[0], "QUANTIZER": {"BIT": 4}},
                "W": {"QUANTIZER": {"BIT": 5}},
            },
            [
                f"W.QUANTIZER.BIT: tensorrt runs weights of 4 or 8 bits, not 5; {SIMULATE}",
                f"A.QUANTIZER.BIT: tensorrt runs activations of 8 bits, not 4; {SIMULATE}",
            ],
        ),
        (
            {"BACKEND": "onnxruntime", "W": {"QUANTIZER": {"BIT": 1}}},
            [f"W.QUANTIZER.BIT: onnxruntime runs weights of 2 to 8 bits, not 1; {SIMULATE}"],
        ),
        (
            {"SCHEDULE": {"BN_TUNING": True}, "W": {"QSCHEME": "per-tensor-symmetric"}},
            [
                "SCHEDULE.BN_TUNING: tuning sets the scales of single channels; "
                "write W.QSCHEME: per-channel-symmetric instead of per-tensor-symmetric, or BN_TUNING: false"
            ],
        ),
        (
            {"BACKEND": "tensorrt", "W": {"QUANTIZER": {"BIT": 5}, "QSCHEME": SYMMETRIC[0]}},
            [
                f"W.QUANTIZER.BIT: tensorrt runs weights of 4 or 8 bits, not 5; {SIMULATE}",
                AFFINE_A,
            ],
        ),
    ],
)
def test_combinations_that_are_refused(data, expected) -> None:
    assert message(data).splitlines() == expected


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "openvino", "tensorrt"])
def test_bits_of_backends(backend, bits) -> None:
    allowed = {
        "virtual": range(1, 17),
        "onnxruntime": range(2, 9),
        "openvino": range(2, 9),
        "tensorrt": (4, 8),
    }
    data = {"BACKEND": backend, "A": {"QSCHEME": SYMMETRIC[0]}, "W": {"QUANTIZER": {"BIT": bits}}}
    if bits in allowed[backend]:
        assert QuantConfig.load(data).w.quantizer.bit == bits
    else:
        assert message(data).startswith(f"W.QUANTIZER.BIT: {backend} runs weights")


def test_weights_only_needs_no_scheme_for_activations() -> None:
    cfg = QuantConfig.load({"BACKEND": "tensorrt", "A": {"QUANTIZER": {"DISABLE": True}}})
    assert cfg.A.QSCHEME == "per-tensor-affine"


def test_bn_tuning_switches_fusing_off() -> None:
    cfg = QuantConfig.load({"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True, "BN_TUNING": True}})
    assert cfg.SCHEDULE.FUSE_BN is False
    edited = _C.override("SCHEDULE.FUSE_BN", True).clone()
    edited.defrost()
    edited.SCHEDULE.BN_TUNING = True
    edited.freeze()
    assert edited == cfg


def test_verify_functions_check_a_config_by_themselves() -> None:
    cfg = _C.clone()
    cfg.defrost()
    for verify in (verify_bits, verify_backend, verify_schedule):
        verify(cfg)
    cfg.merge_from_list(["BACKEND", "tensorrt", "W.QUANTIZER.BIT", 7, "SCHEDULE.BN_TUNING", True])
    cfg.W.QSCHEME = "per-tensor-symmetric"
    for verify, key in (
        (verify_bits, "W.QUANTIZER.BIT"),
        (verify_backend, "A.QSCHEME"),
        (verify_schedule, "SCHED"),
    ):
        with pytest.raises(ConfigError, match=f"^{key}"):
            verify(cfg)
