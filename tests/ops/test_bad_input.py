"""Each bad input raises an error that names the argument, what was wanted and what came."""

import pytest
import torch
from op_cases import qkv, state, tables

from nalaformer_hf.ops import nala_attention, nala_feature_maps, resolve_backend

B, T, H, D, V = 2, 6, 2, 8, 5


def attend(**changes):
    """A good call but for `changes`, which may be functions of the good q, k or v."""
    q, k, v = (x.detach() for x in qkv(B, T, H, D, V, dtype=torch.float32))
    arguments = {"q": q, "k": k, "v": v}
    for name, value in changes.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    return nala_attention(**arguments)


def test_the_good_call_is_good():
    S, z = state("cosine", B, H, D, V, torch.float32)
    o, _ = attend(rotary=tables("phase", "cosine", T, D), initial_state=(S, z), output_final_state=True)
    assert o.isfinite().all()


PACKED = {"q": lambda x: x[:1], "k": lambda x: x[:1], "v": lambda x: x[:1]}
COS, SIN = tables("phase", "cosine", T, D)
S0, Z0 = (x.detach() for x in state("cosine", B, H, D, V, torch.float32))
BOUNDS = torch.tensor([0, 2, T])

# (what is wrong, the error, words that its message must hold)
BAD = {
    "not a tensor": ({"q": [[1.0]]}, TypeError, ["q:", "tensor", "list"]),
    "integer query": ({"q": lambda x: x.long()}, TypeError, ["q:", "float32", "int64"]),
    "complex value": ({"v": lambda x: x + 0j}, TypeError, ["v:", "float32", "complex64"]),
    "float8 key": ({"k": lambda x: x.to(torch.float8_e4m3fn)}, TypeError, ["k:", "float32", "float8"]),
    "rank 3": ({"q": lambda x: x[0]}, ValueError, ["q:", "(6, 2, 8)"]),
    "rank 5": ({"v": lambda x: x[None]}, ValueError, ["v:", "(1, 2, 6, 2, 5)"]),
    "no token": ({"q": lambda x: x[:, :0]}, ValueError, ["q:", "(2, 0, 2, 8)"]),
    "other head dim": ({"k": lambda x: x[..., :7]}, ValueError, ["k:", "(2, 6, 2, 8)", "(2, 6, 2, 7)"]),
    "fewer heads": ({"k": lambda x: x[:, :, :1]}, ValueError, ["k:", "(2, 6, 2, 8)", "(2, 6, 1, 8)"]),
    "other tokens": ({"v": lambda x: x[:, 1:]}, ValueError, ["v:", "(2, 6, 2, 5)", "(2, 5, 2, 5)"]),
    "other batch": ({"v": lambda x: x[:1]}, ValueError, ["v:", "(2, 6, 2, 5)", "(1, 6, 2, 5)"]),
    "one in float64": ({"k": lambda x: x.double()}, TypeError, ["k:", "float64", "float32"]),
    "another device": ({"v": lambda x: x.to("meta")}, ValueError, ["v:", "cpu", "meta"]),
    "unknown form": ({"form": "softmax"}, ValueError, ["form:", "'cosine'", "'softmax'"]),
    "unhashable form": ({"form": ["cosine"]}, ValueError, ["form:", "'cosine'", "['cosine']"]),
    "power in words": ({"power": "3"}, TypeError, ["power:", "number", "'3'"]),
    "power below 1": ({"power": 0.5, "tau": 4.0}, ValueError, ["power:", "at least 1", "0.5"]),
    "power at 0": ({"power": 3.0, "tau": 0.2}, ValueError, ["power * tau:", "at least 1", "3.0 * 0.2"]),
    "infinite power": ({"power": float("inf")}, ValueError, ["power:", "finite", "inf"]),
    "negative tau": ({"tau": -0.5}, ValueError, ["tau:", "at least 0", "-0.5"]),
    "negative gain": ({"gain": -20.0}, ValueError, ["gain:", "at least 0", "-20.0"]),
    "norm_scale in words": ({"norm_scale": "rsqrt_dim"}, TypeError, ["norm_scale:", "number", "rsqrt_dim"]),
    "negative norm_scale": ({"norm_scale": -1.0}, ValueError, ["norm_scale:", "at least 0", "-1.0"]),
    "true as a number": ({"gain": True}, TypeError, ["gain:", "number", "True"]),
    "nan for eps": ({"eps": float("nan")}, ValueError, ["eps:", "finite", "nan"]),
    "negative eps": ({"eps": -1e-6}, ValueError, ["eps:", "at least 0", "-1e-06"]),
    "mask for causal": ({"causal": torch.ones(T, T)}, TypeError, ["causal:", "True or False", "Tensor"]),
    "output_final_state": ({"output_final_state": 1}, TypeError, ["output_final_state:", "int"]),
    "unknown backend": ({"backend": "cuda"}, ValueError, ["backend:", "'torch'", "'cuda'"]),
    "kernels on a CPU": ({"backend": "triton"}, ValueError, ["backend:", "'triton'", "on a GPU", "cpu"]),
    "rotary cos only": ({"rotary": COS}, TypeError, ["rotary:", "(cos, sin)", "Tensor"]),
    "rotary of three": ({"rotary": (COS, SIN, COS)}, TypeError, ["rotary:", "(cos, sin)", "tuple"]),
    "rotary in bf16": ({"rotary": (COS.bfloat16(), SIN)}, TypeError, ["rotary[0]", "float32", "bfloat16"]),
    "rotary too short": ({"rotary": (COS[1:], SIN[1:])}, ValueError, ["rotary[0]", "(6, 8)", "(5, 8)"]),
    "rotary too narrow": (
        {"rotary": (COS[:, :4], SIN[:, :4])},
        ValueError,
        ["rotary[0]", "(6, 8)", "(6, 4)"],
    ),
    "rotary of a baseline": (
        {"rotary": (COS, SIN), "form": "relu"},
        ValueError,
        ["rotary[0]", "(6, 4)", "(6, 8)"],
    ),
    "rotary of another batch": (
        {"rotary": (COS.expand(3, -1, -1), SIN.expand(3, -1, -1))},
        ValueError,
        ["rotary[0]", "(2, 6, 8)", "(3, 6, 8)"],
    ),
    "rotary of two shapes": ({"rotary": (COS, SIN[None])}, ValueError, ["rotary:", "one shape"]),
    "rotary with gradient": (
        {"rotary": (COS, SIN.clone().requires_grad_())},
        ValueError,
        ["rotary[1]", "requires_grad=True"],
    ),
    "unknown layout": ({"rotary_layout": "2d"}, ValueError, ["rotary_layout:", "'axial'", "'2d'"]),
    "axial tables per row": (
        {"rotary": (COS[None], SIN[None]), "rotary_layout": "axial"},
        ValueError,
        ["rotary[0]", "(6, 8)", "(1, 6, 8)"],
    ),
    "axial head dim": (
        {
            "q": lambda x: x[..., :6],
            "k": lambda x: x[..., :6],
            "rotary": (COS[:, :6], SIN[:, :6]),
            "rotary_layout": "axial",
        },
        ValueError,
        ["rotary_layout='axial'", "divisible by 4", "6"],
    ),
    "phase of an odd baseline": (
        {"q": lambda x: x[..., :7], "k": lambda x: x[..., :7], "rotary": (COS, SIN), "form": "elu"},
        ValueError,
        ["rotary_layout='phase'", "divisible by 2", "7"],
    ),
    "state of one": ({"initial_state": S0}, TypeError, ["initial_state:", "(S, z)", "Tensor"]),
    "state in bf16": (
        {"initial_state": (S0.bfloat16(), Z0)},
        TypeError,
        ["initial_state[0] (S):", "float32", "bfloat16"],
    ),
    "state of other widths": (
        {"initial_state": (S0, Z0[..., 1:])},
        ValueError,
        ["initial_state[1] (z):", "(2, 2, 16)", "(2, 2, 15)"],
    ),
    "state of another batch": (
        {"initial_state": (S0[:1], Z0[:1])},
        ValueError,
        ["initial_state[0] (S):", "(2, 2, 16, 5)", "(1, 2, 16, 5)"],
    ),
    "state per sequence": (
        {**PACKED, "cu_seqlens": torch.tensor([0, 2, 4, T]), "initial_state": (S0, Z0)},
        ValueError,
        ["initial_state[0] (S):", "(3, 2, 16, 5)", "(2, 2, 16, 5)"],
    ),
    "bidirectional state": (
        {"causal": False, "initial_state": (S0, Z0)},
        ValueError,
        ["initial_state:", "causal=False"],
    ),
    "bidirectional final state": (
        {"causal": False, "output_final_state": True},
        ValueError,
        ["output_final_state:", "causal=False"],
    ),
    "bidirectional steps": (
        {"causal": False, "backend": "recurrent"},
        ValueError,
        ["backend:", "causal=False", "'recurrent'"],
    ),
    "packed batch": ({"cu_seqlens": BOUNDS}, ValueError, ["cu_seqlens:", "B = 1", "B = 2"]),
    "bounds as a list": ({**PACKED, "cu_seqlens": [0, T]}, TypeError, ["cu_seqlens must", "tensor", "list"]),
    "bounds as floats": (
        {**PACKED, "cu_seqlens": BOUNDS.float()},
        TypeError,
        ["cu_seqlens must", "int32", "float32"],
    ),
    "bounds of rank 2": ({**PACKED, "cu_seqlens": BOUNDS[None]}, ValueError, ["cu_seqlens must", "(1, 3)"]),
    "one bound": (
        {**PACKED, "cu_seqlens": BOUNDS[:1]},
        ValueError,
        ["cu_seqlens must", "(sequences + 1,)", "(1,)"],
    ),
    "bounds that start late": (
        {**PACKED, "cu_seqlens": torch.tensor([1, T])},
        ValueError,
        ["cu_seqlens must", "from 0", "[1, 6]"],
    ),
    "bounds that end early": (
        {**PACKED, "cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        ["cu_seqlens must", "6 tokens", "[0, 5]"],
    ),
    "bounds that fall": (
        {**PACKED, "cu_seqlens": torch.tensor([0, 4, 2, T])},
        ValueError,
        ["cu_seqlens must", "rise", "[0, 4, 2, 6]"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changes, error, words = BAD[name]
    with pytest.raises(error) as raised:
        attend(**changes)
    for word in words:
        assert word in str(raised.value)


def test_unknown_keyword():
    with pytest.raises(TypeError, match="scale"):
        attend(scale=0.5)


def test_keywords_have_no_place():
    q, k, v = qkv(B, T, H, D, V)
    with pytest.raises(TypeError, match="positional"):
        nala_attention(q, k, v, "cosine")


@pytest.mark.parametrize("form", ["cosine", "relu"])
def test_feature_maps_check_too(form):
    q, k, _ = qkv(B, T, H, D, V)
    with pytest.raises(ValueError, match=r"k: wanted the shape \(2, 6, 2, 8\)"):
        nala_feature_maps(q, k[:, 1:], form=form)
    with pytest.raises(ValueError, match=r"power \* tau: wanted at least 1"):
        nala_feature_maps(q, k, form=form, tau=0.1)
    with pytest.raises(TypeError, match="eps"):
        nala_feature_maps(q, k, form=form, eps=1e-6)


def test_resolve_backend_checks_too():
    with pytest.raises(ValueError, match="backend: wanted one of"):
        resolve_backend("fast")
