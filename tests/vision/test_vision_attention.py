"""The vision's attention: against the reference form, the published module, and where that gives NaN."""

from itertools import product

import pytest
import torch
from published import GATES, error, golden_part
from tolerances import EXACT, assert_close_rows

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig
from nalaformer_hf.modeling import (
    linear_attention_nala,
    vision_attention_nala,
    vision_linear_nala,
    vision_pieces_nala,
)
from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.modeling.vision_attention_nala import NaLaVisionAttention
from nalaformer_hf.modeling.vision_block_nala import NaLaVisionFeedForward
from nalaformer_hf.modeling.vision_convolution_nala import NaLaDepthwiseConv
from nalaformer_hf.modeling.vision_linear_nala import EPS, plain_attention, vision_linear_attention
from nalaformer_hf.modeling.vision_rotary_nala import AxialTables, NaLaVisionRotary, rotate
from nalaformer_hf.ops import nala_attention

SPECS = [
    FeatureSpec("polarity"),
    FeatureSpec("polarity", power=4.0, tau=0.7, norm_scale=0.3),
    FeatureSpec("polarity", norm_scale=0.0),
    FeatureSpec("cosine"),
    FeatureSpec("relu"),
]


def random_qkv(batch=2, num_tokens=35, heads=3, dim=8, width=12, dtype=torch.float64):
    shapes = [(batch, num_tokens, heads, size) for size in (dim, dim, width)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("segment", [24, 24 * 20, 1 << 18])
def test_equals_the_reference_form(spec, rotated, segment, monkeypatch):
    """Whatever stands in one segment: a token, part of a row, all rows."""
    for module in (linear_attention_nala, vision_linear_nala):
        monkeypatch.setitem(module.SEGMENT_SIZE, "cpu", segment)
    qkv = random_qkv()
    tables = NaLaVisionRotary(8)(5, 7, qkv[0]) if rotated else None
    expected, _ = nala_attention(
        *qkv,
        form=spec.form,
        power=spec.power,
        tau=spec.tau,
        norm_scale=spec.norm_scale,
        rotary=tables.cos_sin if rotated else None,
        rotary_layout="axial",
        causal=False,
        eps=EPS,
        backend="reference",
    )
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), qkv)
    before = [x.detach().clone() for x in (*qkv, weights)]
    for form in (vision_linear_attention, plain_attention):
        o = form(*qkv, spec, tables)
        assert_close_rows(o, expected, EXACT)
        grads = torch.autograd.grad((o * weights).sum(), qkv)
        for name, grad, wanted in zip("qkv", grads, expected_grads, strict=True):
            assert_close_rows(grad, wanted, EXACT, name)
    assert all(torch.equal(x, y) for x, y in zip((*qkv, weights), before, strict=True))


@pytest.mark.parametrize("heads", [1, 2])
def test_strided_inputs_are_read_and_left_alone(heads):
    fused = torch.randn(2, 12, 4 * 8 * heads).requires_grad_()
    views = [x.unflatten(-1, (heads, 8)) for x in fused.chunk(4, dim=-1)[:3]]
    tables = NaLaVisionRotary(8)(3, 4, fused)
    copy = fused.detach().clone()
    o = vision_linear_attention(*views, FeatureSpec("polarity"), tables)
    grad = torch.ones_like(o)
    o.backward(grad)
    assert torch.equal(fused, copy)
    assert torch.equal(grad, torch.ones_like(grad))
    dense = [x.detach().contiguous() for x in views]
    assert torch.equal(vision_linear_attention(*dense, FeatureSpec("polarity"), tables), o)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_fp32(dtype):
    qkv = [(x.detach() * 60).to(dtype).requires_grad_() for x in random_qkv()]
    tables = NaLaVisionRotary(8)(5, 7, qkv[0])
    wide = [x.detach().float().requires_grad_() for x in qkv]
    o, expected = (vision_linear_attention(*x, FeatureSpec("polarity"), tables) for x in (qkv, wide))
    assert torch.equal(o, expected)
    o.sum().backward()
    expected.sum().backward()
    assert [x.grad.dtype for x in qkv] == [dtype] * 3
    assert torch.equal(qkv[2].grad, wide[2].grad.to(dtype))


@pytest.mark.parametrize("tiny", [0.0, 1e-30])
def test_zero_rows_are_finite(tiny):
    """The published code gives NaN for all gradients."""
    qkv = [x.detach().float() for x in random_qkv()]
    for x in qkv[:2]:
        x[:, ::3] = tiny
        x[:, 1, :, ::2] = 0
    qkv = [x.requires_grad_() for x in qkv]
    tables = NaLaVisionRotary(8)(5, 7, qkv[0])
    for form in (vision_linear_attention, plain_attention):
        o = form(*qkv, FeatureSpec("polarity"), tables)
        assert o.isfinite().all()
        for grad in torch.autograd.grad(o.square().sum(), qkv):
            assert grad.isfinite().all()


CASES = ["nala_16_h1_7x9", "nala_32_h2_6x6_small_k", "nala_32_h4_5x8_large_q", "nala_8_h2_1x1"]


@pytest.mark.parametrize("name", [*CASES, "vanilla_32_h2_6x5"])
@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_published_module(name, dtype):
    case = golden_part(f"module/{name}/")
    kind, width, heads = name.split("_")[:3]
    module = attention(int(width), int(heads[1:]), "linear" if kind == "nala" else "softmax").to(dtype)
    module.load_state_dict(
        {key.removeprefix("state/"): value for key, value in case.items() if key.startswith("state/")}
    )
    x = case["x"].to(dtype).permute(0, 2, 3, 1).clone().requires_grad_()
    made = NaLaVisionRotary(int(width) // int(heads[1:]))(x.shape[1], x.shape[2], case["x"])
    for table, stored in zip(made.cos_sin, (case["cos"], case["sin"]), strict=True):
        torch.testing.assert_close(table, stored, rtol=0, atol=1e-6)
    y = module(x, AxialTables.of(case["cos"].to(dtype), case["sin"].to(dtype))).permute(0, 3, 1, 2)
    assert error(y, case["y.f64"]) <= GATES[dtype][0]
    (y * case["projection"].to(dtype)).sum().backward()
    gradients = {f"grad/{key}": weight.grad for key, weight in module.named_parameters()}
    gradients["grad_x"] = x.grad.permute(0, 3, 1, 2)
    names = [key.removesuffix(".f64") for key in case if key.startswith("grad") and key.endswith(".f64")]
    assert len(names) > 5
    for key in names:
        assert error(gradients[key], case[f"{key}.f64"]) <= GATES[dtype][1], key


PARTS = [{}, {"use_lepe": False}, {"use_rotary": False, "use_output_gate": False}, {"mixers": ["softmax"]}]


@torch.no_grad()
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("size", [(1, 9), (16, 3), (17, 5), (23, 7)])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_pieces_give_the_same_numbers(parts, size, streamed, dtype, monkeypatch):
    """Images that are one block of rows, whole blocks, or end in a part of one; projected twice or once."""
    module = NaLaVisionAttention(one_stage(16, 2, **parts), 0).to(dtype)
    x = torch.randn(3, *size, 16, dtype=dtype)
    tables = NaLaVisionRotary(8)(*size, x) if parts.get("use_rotary", True) else None
    expected = module._whole(x, tables)
    cut(monkeypatch, streamed)
    y = module(x, tables)
    assert y.dtype == dtype
    assert error(y, expected) <= GATES[dtype][0]


def test_pieces_only_where_nothing_is_kept(monkeypatch):
    module, x, seen = NaLaVisionAttention(one_stage(16, 2), 0), torch.randn(2, 9, 5, 16), []
    project = module._project
    monkeypatch.setattr(module, "_project", lambda x: seen.append(x.shape[:3]) or project(x))
    with torch.inference_mode():
        module(x, None)
    cut(monkeypatch, streamed=False)
    module(x, None)
    assert seen == [(2, 9, 5)] * 2
    with torch.inference_mode():
        module(x, None)
    assert seen[2:] == [(1, 9, 5)] * 2
    with torch.inference_mode():
        monkeypatch.setattr(vision_attention_nala, "STREAMED_TOKENS", 45)
        module(x[:1], None)
    sums, reads = [4, 4, 1], [6, 7, 3]  # rows; those that are read go two beyond the block's
    assert seen[4:] == [(1, rows, 5) for rows in sums + reads]


@torch.inference_mode()
@pytest.mark.parametrize("streamed", [True, False])
def test_pieces_under_autocast(streamed, monkeypatch):
    """The same low precision in the same places."""
    module, x = NaLaVisionAttention(one_stage(16, 2), 0), torch.randn(2, 17, 5, 16)
    tables = NaLaVisionRotary(8)(17, 5, x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module._whole(x, tables)
        cut(monkeypatch, streamed)
        y = module(x, tables)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(1, 9), (16, 3), (17, 5)])
def test_pieces_of_the_feed_forward_give_the_same_numbers(batch, size, monkeypatch):
    ffn, x = NaLaVisionFeedForward(16, 40).double(), torch.randn(batch, *size, 16, dtype=torch.float64)
    expected = ffn.fc2(ffn._inner(x))
    assert torch.equal(ffn(x), expected)
    cut(monkeypatch, streamed=False)
    seen, inner = [], ffn._inner
    monkeypatch.setattr(ffn, "_inner", lambda piece: seen.append(piece.shape) or inner(piece))
    assert error(ffn(x), expected) <= EXACT
    assert len(seen) == batch * -(-size[0] // 4)


@torch.no_grad()
def test_hooks_inside_a_layer_see_the_whole_batch(monkeypatch):
    cut(monkeypatch, streamed=False)
    attend, ffn = NaLaVisionAttention(one_stage(16, 2), 0), NaLaVisionFeedForward(16, 40)
    x, seen = torch.randn(3, 17, 5, 16), []
    for module in (attend.out_proj, ffn.fc2):
        module.register_forward_hook(lambda _, __, y: seen.append(y.shape))
    attend(x, None)
    ffn(x)
    assert seen == [x.shape] * 2


def cut(monkeypatch, streamed):
    """From here on, a piece is one image at the most, and 4 rows of it where rows can be cut."""
    monkeypatch.setattr(vision_pieces_nala, "PIECE_SIZE", 1)
    monkeypatch.setattr(vision_attention_nala, "BLOCK_TOKENS", 1)
    if streamed:
        monkeypatch.setattr(vision_attention_nala, "STREAMED_TOKENS", 1)


def attention(width: int, heads: int, mixer: str) -> NaLaVisionAttention:
    return NaLaVisionAttention(one_stage(width, heads, mixer), 0)


def one_stage(width: int, heads: int, mixer: str = "linear", **fields) -> NaLaVisionConfig:
    return NaLaVisionConfig(
        **{
            "hidden_sizes": [width],
            "num_attention_heads": [heads],
            "depths": [1],
            "mlp_ratios": [2.5],
            "layer_scale_init_values": [1.0],
            "mixers": [mixer],
            **fields,
        }
    )


@torch.no_grad()
@pytest.mark.parametrize(("name", "mixer"), [("l_small_input", "linear"), ("v", "softmax")])
@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_published_block(name, mixer, dtype):
    case = golden_part(f"block/{name}/")
    block = NaLaForImageClassification(one_stage(16, 2, mixer)).model.layers[0].blocks[0].to(dtype).eval()
    ours = {"norm1.norm": "norm1", "norm2.norm": "norm2", "gamma_": "layer_scale"}
    state = {}
    for key, value in case.items():
        if key.startswith("state/"):
            for published, own in ours.items():
                key = key.replace(published, own)
            state[key.removeprefix("state/")] = value.flatten() if "layer_scale" in key else value
    block.load_state_dict(state)
    tables = AxialTables.of(case["cos"].to(dtype), case["sin"].to(dtype))
    y = block(case["x"].to(dtype).permute(0, 2, 3, 1), tables).permute(0, 3, 1, 2)
    assert error(y, case["y.f64"]) <= GATES[dtype][0]


@pytest.mark.parametrize(("size", "dim"), [((14, 14), 96), ((3, 5), 32), ((7, 7), 32)])
def test_published_tables(size, dim):
    heads = 12 if size == (7, 7) else 1
    case = golden_part(f"rope/{size[0]}x{size[1]}_d{dim * heads}_h{heads}/")
    rotary = NaLaVisionRotary(dim)
    angles = torch.tensor(rotary.angles).repeat_interleave(2)
    torch.testing.assert_close(angles, case["angle"], rtol=1e-6, atol=0)
    tables = rotary(*size, torch.zeros(1))
    for table, stored in zip(tables.cos_sin, (case["cos"], case["sin"]), strict=True):
        torch.testing.assert_close(table, stored, rtol=0, atol=1e-6)


def test_tables_survive_casts_and_inference_mode():
    rotary = NaLaVisionRotary(8)
    with torch.inference_mode():
        rotary(3, 4, torch.zeros(1))
    for cast in (rotary.half(), rotary.bfloat16()):
        assert cast(3, 4, torch.zeros(1, dtype=torch.bfloat16)).pairs.dtype == torch.float32
    x = torch.randn(2, 12, 8, requires_grad=True)
    rotate(x, rotary(3, 4, x)).sum().backward()
    assert x.grad.isfinite().all()
    assert rotary(4, 3, x).pairs.shape == (12, 4, 2)
    assert not torch.equal(rotary(4, 3, x).pairs, rotary(3, 4, x).pairs)


@pytest.mark.parametrize(("kernel", "residual"), list(product((3, 5), (True, False))))
@pytest.mark.parametrize("size", [(1, 1), (2, 7), (6, 5)])
def test_depthwise_convolution_and_its_gradients(kernel, residual, size):
    conv = NaLaDepthwiseConv(4, kernel, residual).double()
    x = torch.randn(2, *size, 4, dtype=torch.float64, requires_grad=True)
    image = x.permute(0, 3, 1, 2)
    plain = torch.nn.functional.conv2d(image, conv.weight, conv.bias, padding=kernel // 2, groups=4)
    plain = (image + plain if residual else plain).permute(0, 2, 3, 1)
    weights = torch.randn_like(plain)
    inputs = [x, conv.weight, conv.bias]
    expected = torch.autograd.grad((plain * weights).sum(), inputs)
    y = conv(x)
    torch.testing.assert_close(y, plain, rtol=0, atol=1e-13)
    for actual, wanted in zip(torch.autograd.grad((y * weights).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
