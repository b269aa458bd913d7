"""NaLaAttention as a layer of its own, outside the model."""

import pytest
import torch
from tiny_models import ALL_NALA, error, tiny_config
from transformers import DynamicCache

from nalaformer_hf import NaLaAttention


def layer_and_input(name, length=20, **fields):
    torch.manual_seed(0)
    return NaLaAttention(tiny_config(name, **fields), layer_idx=0), torch.randn(2, length, 32)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL_NALA)
def test_cache(name):
    layer, x = layer_and_input(name)
    cache = DynamicCache(config=layer.config)
    pieces = [layer(x[:, start:end], cache=cache)[0] for start, end in ((0, 9), (9, 10), (10, 20))]
    assert error(torch.cat(pieces, dim=1), layer(x)[0]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ALL_NALA)
def test_mask(name):
    layer, x = layer_and_input(name)
    mask = torch.ones(2, 20)
    mask[0, [0, 7, 8, 19]] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0).long()
    output, weights = layer(x, attention_mask=mask, position_ids=positions)
    assert weights is None
    assert error(output[0, mask[0].bool()], layer(x[:1, mask[0].bool()])[0][0]) < 1e-5
    assert error(output[1], layer(x[1:])[0][0]) < 1e-5


@torch.no_grad()
def test_positions():
    layer, x = layer_and_input("linear-rotary")
    counted = layer(x)[0]
    assert torch.equal(layer(x, position_ids=torch.arange(20)[None])[0], counted)
    assert error(layer(x, position_ids=torch.arange(100, 120).expand(2, -1))[0], counted) < 1e-4
    assert error(layer(x, position_ids=torch.arange(0, 40, 2)[None])[0], counted) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", ALL_NALA)
def test_packed_rows(name):
    layer, x = layer_and_input(name)
    positions = torch.cat([torch.arange(5), torch.arange(15)])[None].expand(2, -1)
    packed = layer(x, cu_seqlens=torch.tensor([0, 5, 20, 25, 40]), position_ids=positions)[0]
    separate = torch.cat([layer(x[:, :5])[0], layer(x[:, 5:])[0]], dim=1)
    assert error(packed, separate) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "linear-rotary", "linear-elu"])
def test_bidirectional(name):
    layer, x = layer_and_input(name, is_causal=False)
    changed = x.clone()
    changed[:, -1] += 1
    assert (layer(x)[0][:, 0] != layer(changed)[0][:, 0]).all()


def test_arguments_are_checked():
    layer, x = layer_and_input("linear")
    with pytest.raises(
        ValueError, match=r"hidden_states must be floats \(batch, tokens, 32\).*\(2, 20, 16\)"
    ):
        layer(x[..., :16])
    with pytest.raises(
        ValueError, match=r"attention_mask must be \(batch, tokens\), \(2, 20\), got \(2, 19\)"
    ):
        layer(x, attention_mask=torch.ones(2, 19))
    with pytest.raises(
        ValueError, match="cu_seqlens: packed sequences take neither attention_mask nor cache"
    ):
        layer(x, attention_mask=torch.ones(2, 20), cu_seqlens=torch.tensor([0, 40]))
    with pytest.raises(ValueError, match="position_ids: a rotary layer needs them beside attention_mask"):
        layer_and_input("linear-rotary")[0](x, attention_mask=torch.ones(2, 20))
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to the 40 tokens, got \[0, 20\]"):
        layer(x, cu_seqlens=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="cache: layer 0 must be a NaLa layer, got NoneType"):
        layer(x, cache=DynamicCache())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"hidden_states": torch.zeros(2, 0, 32)},
            ValueError,
            r"hidden_states must .* one token.*\(2, 0, 32\)",
        ),
        ({"hidden_states": torch.zeros(2, 20, 32).long()}, ValueError, "hidden_states must be floats.*int64"),
        ({"hidden_states": [[0.0]]}, TypeError, "hidden_states must be a tensor, got list"),
        ({"attention_mask": [1] * 20}, TypeError, "attention_mask must be a tensor, got list"),
        (
            {"attention_mask": torch.ones(20)},
            ValueError,
            r"attention_mask must be \(batch, tokens\).*\(20,\)",
        ),
        ({"position_ids": torch.arange(20)}, ValueError, r"position_ids must be integers \(2 or 1, 20\)"),
        ({"position_ids": torch.zeros(2, 20)}, ValueError, "position_ids must be integers .*torch.float32"),
        ({"position_ids": torch.arange(19)[None]}, ValueError, r"position_ids .* of shape \(1, 19\)"),
        ({"cache": {}}, TypeError, "cache must be a transformers Cache.*got dict"),
        ({"cu_seqlens": [0, 40]}, TypeError, "cu_seqlens must be a tensor, got list"),
        ({"cu_seqlens": torch.tensor([0.0, 40.0])}, TypeError, "cu_seqlens must be int32 or int64"),
    ],
)
def test_wrong_arguments_are_refused(arguments, kind, message):
    layer, x = layer_and_input("linear-rotary")
    with pytest.raises(kind, match=message):
        layer(**{"hidden_states": x, **arguments})
