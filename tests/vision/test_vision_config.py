"""NaLaVisionConfig: every contradiction and every wrong field is refused when the config is built."""

import pytest

from nalaformer_hf import NaLaVisionConfig

NAN, INF = float("nan"), float("inf")
SMALL = {"hidden_sizes": [8, 12, 16, 24], "num_attention_heads": [1, 1, 2, 3], "depths": [1, 1, 2, 1]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizes": [6, 12, 16, 24]}, r"head dim divisible by 4, got 6 / 1 = 6"),
        ({"num_attention_heads": [1, 5, 2, 3]}, "multiples of num_attention_heads, got 12 with 5 heads"),
        ({"mixers": ["linear", "linear", "softmax", "soft"]}, "mixers: got 'soft'; did you mean 'softmax'"),
        ({"depths": [1, 1]}, r"depths must have one entry a stage, 4 like hidden_sizes, got \[1, 1\]"),
        ({"layer_scale_init_values": [1.0]}, "layer_scale_init_values must have one entry a stage"),
        ({"hidden_sizes": []}, "hidden_sizes must have one entry a stage, got none"),
        ({"hidden_sizes": [7, 12, 16, 24], "use_rotary": False}, "needs an even first width, got 7"),
        ({"stem": "convolution"}, "stem: got 'convolution'; did you mean 'conv'"),
        ({"feature_form": "polar"}, "feature_form: got 'polar'; did you mean 'polarity'"),
        ({"feature_tau": 0.2}, r"feature_power \* feature_tau must be at least 1"),
        ({"norm_scale": "sqrt"}, "norm_scale must be a number or 'rsqrt_dim'"),
        ({"mlp_ratios": [2.0, 2.0, 2.0, 0.01]}, "inner width must be at least 1"),
        ({"out_features": ["stage9"]}, "stage9"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        NaLaVisionConfig(**{**SMALL, **fields})


# (what is asked of a number, the fields, numbers that are refused)
RANGES = [
    ("be at least 1", ["num_channels", "image_size", "projection_dim"], [0, -1]),
    ("have at least 1 label", ["num_labels"], [0, -1]),
    ("be finite and positive", ["layer_norm_eps"], [0, -1.0, NAN, INF]),
    ("be finite and not negative", ["initializer_range", "norm_scale"], [-1.0, NAN, INF]),
    (r"be in \[0, 1\)", ["drop_path_rate"], [-0.1, 1.0, NAN]),
]
LIST_RANGES = [
    ("be at least 1", ["hidden_sizes", "depths", "num_attention_heads"], [0, -1]),
    ("be finite and positive", ["mlp_ratios"], [0, -1.0, NAN, INF]),
    ("be finite", ["layer_scale_init_values"], [NAN, INF]),
]


def refused(ranges):
    return [(wanted, field, number) for wanted, fields, some in ranges for field in fields for number in some]


@pytest.mark.parametrize(("wanted", "field", "number"), refused(RANGES))
def test_numbers_out_of_range_are_refused(wanted, field, number):
    with pytest.raises(ValueError, match=f"{field} must {wanted}, got {number}"):
        NaLaVisionConfig(**{**SMALL, field: number})


@pytest.mark.parametrize(("wanted", "field", "number"), refused(LIST_RANGES))
def test_lists_with_a_number_out_of_range_are_refused(wanted, field, number):
    with pytest.raises(ValueError, match=rf"{field} must {wanted}, got \[1, 1, 1, {number}\]"):
        NaLaVisionConfig(**{**SMALL, field: [1, 1, 1, number]})


@pytest.mark.parametrize("item", [True, None, []])
@pytest.mark.parametrize("field", ["hidden_sizes", "depths", "num_attention_heads", "mlp_ratios", "mixers"])
def test_items_of_a_wrong_type_are_refused(field, item):
    with pytest.raises(TypeError, match=rf"Field '{field}\[0\]'.* got {type(item).__name__}"):
        NaLaVisionConfig(**{**SMALL, field: [item] * 4})


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="has no field 'depth'; did you mean 'depths'"):
        NaLaVisionConfig(depth=[1, 1, 1, 1])
    with pytest.raises(ValueError, match="no preset 'xtt'; did you mean 'xt'"):
        NaLaVisionConfig.from_preset("xtt")
    assert NaLaVisionConfig.from_preset("xt", id2label={0: "cat", 1: "dog"}).num_labels == 2
