"""The JSON schema accepts what the config accepts (with upper-case keys) and refuses typos."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sparsebit.config import read_yaml
from sparsebit.errors import ConfigError
from sparsebit.quantization.presets import preset_path, presets
from sparsebit.quantization.quant_config import QuantConfig, json_schema

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON schema that we use; an unknown keyword is an error, so that nothing passes unread."""
    known = {"type", "enum", "anyOf", "pattern", "properties", "additionalProperties", "items"}
    known |= {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "default",
        "description",
        "title",
        "$schema",
    }
    assert schema.keys() <= known, schema.keys() - known
    if "anyOf" in schema and not any(accepts(option, value) for option in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(kind, value) for kind in kinds):
        return False
    if "pattern" in schema and not (isinstance(value, str) and re.search(schema["pattern"], value)):
        return False
    if isinstance(value, list):
        return all(accepts(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        rest = schema.get("additionalProperties", {})
        parts = [(schema.get("properties", {}).get(key, rest), item) for key, item in value.items()]
        return all(part is not False and accepts(part, item) for part, item in parts)
    return _in_range(schema, value)


def _is(kind: str, value: Any) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _in_range(schema: dict[str, Any], value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return True
    inf = float("inf")
    return (
        schema.get("minimum", -inf) <= value <= schema.get("maximum", inf)
        and schema.get("exclusiveMinimum", -inf) < value < schema.get("exclusiveMaximum", inf)
    ) or value in (inf, -inf)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(json.dumps(json_schema()))  # it is JSON


@pytest.mark.parametrize("name", presets())
def test_accepts_presets_and_dumps(schema, name) -> None:
    assert accepts(schema, read_yaml(preset_path(name)))
    assert accepts(schema, QuantConfig.load(name).to_dict())


GOOD = [
    {},
    {"W": {"QUANTIZER": {"TYPE": "LSQ_plus", "BIT": 2}}},
    {"A": {"QUANTIZER": {"TYPE": "lsq+", "DISABLE": True, "PACT": {"ALPHA_VALUE": 6}}}},
    {"A": {"OBSERVER": {"TYPE": "KL_HISTOGRAM", "LAYOUT": "nlc", "PERCENTILE": {"ALPHA": 0.01}}}},
    {"A": {"OBSERVER": {"ACIQ": {"DISTRIBUTION": "GAUS"}}, "QADD": {"ENABLE_QUANT": True}}},
    {"W": {"QSCHEME": "Per_Channel_Symmetric", "SPECIFIC": [{"*head": ["QUANTIZER.BIT", 8]}]}},
    {"W": {"SPECIFIC": {"*head": {"QUANTIZER": {"BIT": 8}}}}},
    {"SCHEDULE": {"FUSE_BN": True, "MY_FUSION": False}, "SKIP_TRACE_MODULES": ["a.*"], "DEVICE": "cpu"},
]
BAD = [
    {"WW": {}},
    {"BACKEND": "tensort"},
    {"W": {"QUANTIZER": {"BITS": 8}}},
    {"W": {"QUANTIZER": {"BIT": "8"}}},
    {"W": {"QUANTIZER": {"BIT": 17}}},
    {"W": {"QUANTIZER": {"TYPE": "lsqq"}}},
    {"W": {"OBSERVER": {"LAYOUT": "NCHW"}}},
    {"W": {"QSCHEME": "per-chanel-symmetric"}},
    {"A": {"OBSERVER": {"PERCENTILE": {"ALPHAA": 1}}}},
    {"A": {"OBSERVER": {"ACIQ": {"DISTRIBUTION": "cauchy"}}}},
    {"A": {"QUANTIZER": {"PACT": {"ALPHA_VALUE": -1}}}},
    {"A": {"SPECIFIC": [["a"]]}},
    {"SCHEDULE": {"MY_FUSION": 1}},
    {"SKIP_TRACE_MODULES": "a"},
]


@pytest.mark.parametrize("data", GOOD)
def test_accepts_what_the_config_accepts(schema, data) -> None:
    QuantConfig.load(data)
    assert accepts(schema, data)


@pytest.mark.parametrize("data", BAD)
def test_refuses_what_the_config_refuses(schema, data) -> None:
    with pytest.raises(ConfigError):
        QuantConfig.load(data)
    assert not accepts(schema, data)


def test_offers_names_defaults_and_descriptions(schema) -> None:
    quantizer = schema["properties"]["W"]["properties"]["QUANTIZER"]["properties"]
    assert "lsq+" in quantizer["TYPE"]["anyOf"][0]["enum"]
    assert quantizer["BIT"]["default"] == 8
    assert quantizer["BIT"]["description"] == "bits per value"
