"""NaLaConfig: every contradiction and every wrong field is refused when the config is built."""

import copy
import json

import pytest
import torch
from tiny_models import FEW, VARIANTS, random_ids, tiny_config, tiny_model
from transformers import AutoConfig

from nalaformer_hf import NaLaConfig, NaLaForCausalLM

NAN, INF = float("nan"), float("inf")
CONTRADICTIONS = [
    ({"mixer": "linaer"}, "mixer: got 'linaer'; did you mean 'linear'"),
    ({"feature_form": "cos"}, "feature_form: got 'cos'; did you mean 'cosine'"),
    (
        {"fuse_norm": True, "output_norm": "none"},
        "fuse_norm needs an output norm and a gate to fuse, got output_norm='none'",
    ),
    ({"fuse_norm": True, "use_output_gate": False}, "fuse_norm needs .* use_output_gate=False"),
    ({"output_norm": "rms"}, "output_norm: got 'rms'; known: layer_norm, head_rms_norm, none"),
    ({"classifier_pooling": "max"}, "classifier_pooling: got 'max'"),
    ({"hidden_act": "sliu"}, "hidden_act: got 'sliu'; did you mean 'silu'"),
    (
        {"hidden_size": 30, "num_attention_heads": 4},
        "hidden_size must be a multiple of num_attention_heads.*30.*4",
    ),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    (
        {"layer_types": ["nala_attention"]},
        "layer_types must have one entry a layer, got 1 .*num_hidden_layers=2",
    ),
    ({"layer_types": ["linear_attention"] * 2}, "layer_types: 'linear_attention' .*use 'nala_attention'"),
    ({"layer_types": ["nala", "full_attention"]}, "layer_types: no layer type 'nala'.*nala_attention"),
    ({"layer_types": ["full_attention"] * 2, "head_dim": 5}, "head_dim must be even for the rotary .*got 5"),
    (
        {"layer_types": ["full_attention"] * 2, "num_attention_heads": 4, "num_key_value_heads": 3},
        "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3",
    ),
    ({"norm_scale": "sqrt"}, "norm_scale must be a number or 'rsqrt_dim', got 'sqrt'"),
    ({"feature_power": 1.0}, "feature_power \\* feature_tau must be at least 1 .*got 1.0 \\* 0.5"),
    (
        {"use_rotary": True, "feature_form": "relu", "head_dim": 5},
        "head_dim must be even for use_rotary with 'relu'",
    ),
    ({"use_rotary": True, "mixer": "delta"}, "use_rotary concerns the 'linear' mixer only.*'delta'"),
    (
        {"use_rotary": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters: use_rotary takes rope_type 'default'.*'linear'",
    ),
    (
        {"use_rotary": True, "rope_theta": -1.0},
        "rope_parameters: rope_theta must be finite and positive, got -1.0",
    ),
    ({"rope_theta": "x"}, "rope_parameters: rope_theta must be finite and positive, got 'x'"),
    (
        {"rope_parameters": {"rope_theta": NAN}},
        "rope_parameters: rope_theta must be finite and positive, got nan",
    ),
    (
        {"rope_parameters": {"rope_type": "liner"}},
        "rope_parameters: no rope_type 'liner'; did you mean 'linear'",
    ),
    (
        {"rope_parameters": {"rope_thta": 5.0}},
        "rope_parameters: 'default' has no 'rope_thta'; did you mean 'rope_theta'",
    ),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: 'default' has no 'full_attention'"),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters: 'default' has no 'partial_rotary_factor'",
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "rope_parameters: factor must be finite and positive, got 0",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": 2.0}},
        "rope_parameters: short_factor must be a list, each number finite and positive, got 2.0",
    ),
    (
        {"rope_parameters": {"rope_type": "linear"}, "layer_types": ["full_attention"] * 2},
        "rope_parameters: Missing required keys .*factor",
    ),
    ({"id2label": {}}, "id2label must have at least 1 label, got 0"),
    ({"id2label": {"cat": 0}}, r"id2label must map numbers to names, got the keys \['cat'\]"),
    ({"dtype": "float31"}, "dtype must name a dtype of torch, such as 'float32', got 'float31'"),
    (
        {"is_causal": False, "mixer": "gated_delta"},
        "is_causal=False needs the 'linear' mixer, got mixer='gated_delta'",
    ),
    ({"mixer": "delta", "head_dim": 160}, "head_dim: the delta mixers take features up to 256 wide, got 320"),
]


@pytest.mark.parametrize(
    ("fields", "message"), CONTRADICTIONS, ids=[message[:30] for _, message in CONTRADICTIONS]
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


# (what is asked of a number, the fields, numbers that are refused)
RANGES = [
    (
        "at least 1",
        ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"],
        [0, -2],
    ),
    ("at least 1", ["head_dim", "value_head_dim", "conv_size", "max_position_embeddings"], [0, -2]),
    ("at least 1", ["num_labels"], [0, -2]),
    (
        "finite and positive",
        ["feature_power", "feature_tau", "feature_gain", "rms_norm_eps"],
        [0, -1.0, NAN, INF],
    ),
    ("finite and not negative", ["norm_scale", "initializer_range"], [-1.0, NAN, INF]),
    ("finite and not negative", ["pad_token_id", "bos_token_id", "eos_token_id"], [-1]),
    (r"in \[0, 1\)", ["attention_dropout"], [-0.1, 1.0, NAN]),
]


@pytest.mark.parametrize(
    ("wanted", "field", "number"),
    [(wanted, field, number) for wanted, fields, numbers in RANGES for field in fields for number in numbers],
)
def test_numbers_out_of_range_are_refused(wanted, field, number):
    with pytest.raises(ValueError, match=rf"{field} must .*{wanted}.*, got {number}"):
        tiny_config(**{field: number})


@pytest.mark.parametrize("field", ["vocab_size", "conv_size", "feature_power", "rms_norm_eps", "num_labels"])
@pytest.mark.parametrize("value", [True, "3", [3]])
def test_what_is_no_number_is_refused(field, value):
    with pytest.raises(TypeError, match=rf"Field '{field}'.* got {type(value).__name__}"):
        tiny_config(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "32"},
        {"hidden_size": 32.0},
        {"num_hidden_layers": True},
        {"conv_size": 2.5},
        {"mixer": 3},
        {"norm_scale": None},
        {"feature_power": "3"},
        {"use_rotary": 1},
        {"layer_types": [3, 4]},
        {"layer_types": "full_attention"},
        {"eos_token_id": "a"},
        {"id2label": ["a"]},
        {"problem_type": "ranking"},
        {"dtype": 32},
        {"output_attentions": "yes"},
    ],
)
def test_wrong_types_are_refused(fields):
    (field,) = fields
    with pytest.raises(TypeError, match=rf"Field '{field}(\[0\])?'.* got \w+"):
        tiny_config(**fields)


@pytest.mark.parametrize(
    ("keyword", "nearest"), [("mixr", "mixer"), ("norm_scales", "norm_scale"), ("layers", "layer_types")]
)
def test_unknown_fields_are_refused(keyword, nearest):
    with pytest.raises(TypeError, match=f"NaLaConfig has no field '{keyword}'; did you mean '{nearest}'"):
        tiny_config(**{keyword: 1})


def test_a_field_spoilt_later_is_refused_at_save(tmp_path):
    config = tiny_config()
    config.mixer = "bogus"
    with pytest.raises(Exception, match="mixer: got 'bogus'"):
        config.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="Field 'conv_size' expected int"):
        config.conv_size = "4"


def test_defaults_follow_the_mixer():
    assert tiny_config().output_norm == "layer_norm"
    assert tiny_config("delta").output_norm == "head_rms_norm"
    config = tiny_config(head_dim=None, value_head_dim=None)
    assert (config.head_dim, config.value_head_dim, config.num_key_value_heads) == (16, 16, 2)
    assert config.layer_types == ["nala_attention"] * 2
    assert tiny_config(head_dim=64, norm_scale="rsqrt_dim").feature_spec.norm_scale == 0.125


@pytest.mark.parametrize("name", VARIANTS)
def test_json_round_trip(name, tmp_path):
    config = tiny_config(name, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    config.save_pretrained(tmp_path)
    loaded = NaLaConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert (
        NaLaConfig.from_dict(json.loads(config.to_json_string(use_diff=False))).to_dict() == config.to_dict()
    )
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    automatic = AutoConfig.from_pretrained(tmp_path)
    assert type(automatic) is NaLaConfig
    assert AutoConfig.for_model("nala", mixer="delta").mixer == "delta"


def test_fields_that_another_program_added_are_kept(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unsloth_version": "2026.1"}))
    config = NaLaConfig.from_pretrained(tmp_path)
    assert config.unsloth_version == "2026.1"
    assert config.hidden_size == 32
    assert AutoConfig.from_pretrained(tmp_path, hidden_size=64, head_dim=32).hidden_size == 64


def test_loading_with_an_unknown_field_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="mixr"):
        NaLaForCausalLM.from_pretrained(tmp_path, mixr="delta")


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "change",
    [
        {"feature_power": 4.0},
        {"feature_tau": 0.7},
        {"norm_scale": 0.1},
        {"feature_form": "relu"},
        {"use_output_gate": False},
        {"conv_size": 2, "use_short_conv": True},
        {"output_norm": "none"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_has_an_effect(name, change):
    """With the same weights where both have them."""
    if name == "delta-no-conv" and change == {"use_output_gate": False}:
        change = {"use_output_gate": True}
    ids, model, changed = random_ids(1, 12), tiny_model(name), tiny_model(name, **change)
    weights = {key: value for key, value in model.state_dict().items() if "conv1d" not in key}
    changed.load_state_dict(weights, strict=False)
    difference = (changed(ids).logits - model(ids).logits).abs().max()
    assert difference > 1e-3


def test_gain_has_an_effect_on_the_cosine_form():
    ids = random_ids(1, 12)
    with torch.no_grad():
        assert (tiny_model(feature_gain=1.0)(ids).logits - tiny_model()(ids).logits).abs().max() > 1e-3
