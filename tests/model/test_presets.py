"""The presets: exact sizes, and the shape that the paper's models have."""

import pytest
import torch
from tiny_models import ALL_NALA, cache_bytes, random_ids, tiny_model

from nalaformer_hf import NaLaConfig, NaLaForCausalLM
from nalaformer_hf.modeling.configuration_nala import PRESETS

# Counted by hand in `by_hand`, stated in docs/models.md.
PARAMETERS = {
    "tiny": 4_545_056,
    "small": 32_105_600,
    "340m-linear": 399_377_408,
    "340m-deltanet": 374_067_200,
    "340m-deltanet-conv": 374_362_112,
    "340m-gated-deltanet": 379_888_124,
}


def by_hand(config):
    """Number of parameters of a model without full attention, from its config."""
    C, heads = config.hidden_size, config.num_attention_heads
    keys, values = heads * config.head_dim, heads * config.value_head_dim
    mixer = 2 * C * keys + 2 * C * values  # q, k, v, output
    mixer += C * values if config.use_output_gate else 0
    mixer += config.conv_size * (2 * keys + values) if config.use_short_conv else 0
    mixer += {"linear": 0, "delta": C * heads, "gated_delta": 2 * C * heads + 2 * heads}[config.mixer]
    mixer += {"layer_norm": 2 * values, "head_rms_norm": config.value_head_dim, "none": 0}[config.output_norm]
    block = mixer + 3 * C * config.intermediate_size + 2 * C
    embeddings = config.vocab_size * C * (1 if config.tie_word_embeddings else 2)
    return embeddings + config.num_hidden_layers * block + C


def state_bytes(config):
    """Bytes that a cache holds for one row of an fp32 model without full attention."""
    keys, values = config.head_dim, config.value_head_dim
    columns = values + 1 if config.mixer == "linear" else values
    state = config.feature_spec.width(keys) * columns
    window = (config.conv_size - 1) * (2 * keys + values) if config.use_short_conv else 0
    return 4 * config.num_hidden_layers * config.num_attention_heads * (state + window)


def on_meta(config):
    with torch.device("meta"):
        model = NaLaForCausalLM(config)
    model.tie_weights()
    return model


def test_every_preset_is_counted():
    assert PARAMETERS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    config = NaLaConfig.from_preset(name)
    assert on_meta(config).num_parameters() == by_hand(config) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_documented_parameter_counts(name, pytestconfig):
    docs = (pytestconfig.rootpath / "docs" / "models.md").read_text()
    (row,) = [line for line in docs.splitlines() if line.startswith(f"| `{name}` |")]
    assert f"{PARAMETERS[name]:,}" in row
    assert f"{state_bytes(NaLaConfig.from_preset(name)) / 1e6:.1f} MB" in row


@torch.no_grad()
@pytest.mark.parametrize("name", ALL_NALA)
def test_documented_state_sizes_are_those_of_a_cache(name):
    model = tiny_model(name)
    assert cache_bytes(model(random_ids(1, 9), use_cache=True).cache) == state_bytes(model.config)


def test_presets_of_the_paper():
    for name in PARAMETERS:
        config = NaLaConfig.from_preset(name)
        if name.startswith("340m"):
            assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (1024, 2816, 32000)
            assert not config.tie_word_embeddings
    deltanet, twin = (NaLaConfig.from_preset(name) for name in ("340m-deltanet", "340m-deltanet-conv"))
    assert (deltanet.use_short_conv, twin.use_short_conv) == (False, True)
    assert (deltanet.mixer, deltanet.num_hidden_layers, deltanet.use_output_gate) == ("delta", 24, False)
    gated = NaLaConfig.from_preset("340m-gated-deltanet")
    assert (gated.mixer, gated.num_hidden_layers, gated.num_attention_heads) == ("gated_delta", 21, 6)
    assert (gated.head_dim, gated.value_head_dim, gated.use_output_gate) == (128, 256, True)
    linear = NaLaConfig.from_preset("340m-linear")
    assert (linear.mixer, linear.num_hidden_layers, linear.num_attention_heads) == ("linear", 24, 8)
    assert (linear.use_output_gate, linear.use_short_conv) == (True, True)


def test_fields_of_a_preset_can_be_overridden():
    config = NaLaConfig.from_preset("tiny", num_hidden_layers=2, mixer="delta")
    assert (config.num_hidden_layers, config.mixer, config.hidden_size) == (2, "delta", 256)
    assert NaLaConfig.from_preset("tiny").num_hidden_layers == 4


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="no preset '340m-liner'; did you mean '340m-linear'"):
        NaLaConfig.from_preset("340m-liner")
    with pytest.raises(TypeError, match="NaLaConfig has no field 'layers'"):
        NaLaConfig.from_preset("tiny", layers=3)


def test_the_tiny_preset_runs():
    torch.manual_seed(0)
    model = NaLaForCausalLM(NaLaConfig.from_preset("tiny"))
    ids = torch.randint(4096, (1, 16))
    assert torch.isfinite(model(ids, labels=ids).loss)
