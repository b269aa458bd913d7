"""The op inside the attention module of the published vision code: its outputs and gradients, on file.

`golden/README.md` says how the files were made: `.f64` is the published code in float64, and the gates in
fp32 are a few times what that code itself is off in fp32.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from nalaformer_hf.ops import nala_attention

GATES = {torch.float32: (5e-6, 2e-5), torch.float64: (1e-12, 1e-12)}
# Case: heads. small_k makes ε visible; 1x1 is one token of one pair of angles.
CASES = {"nala_16_h1_7x9": 1, "nala_32_h2_6x6_small_k": 2, "nala_32_h4_5x8_large_q": 4, "nala_8_h2_1x1": 2}


@cache
def golden() -> dict[str, Tensor]:
    return load_file(Path(__file__).parents[1] / "golden" / "golden_tiny.safetensors")


def attention_module(x: Tensor, weights: dict[str, Tensor], heads: int, rotary, backend: str) -> Tensor:
    """Projections, the op, local enhancement, norm, gate, output projection: (B, C, H, W) to the same."""
    _, C, height, width = x.shape
    tokens = x.flatten(2).mT
    q, k, v, g = F.linear(tokens, weights["qkvg.weight"], weights["qkvg.bias"]).chunk(4, dim=-1)
    image = v.mT.unflatten(2, (height, width))
    lepe = F.conv2d(image, weights["lepe.weight"], weights["lepe.bias"], padding=2, groups=C)
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in (q, k, v))
    o, _ = nala_attention(
        q, k, v, form="polarity", rotary=rotary, rotary_layout="axial", causal=False, backend=backend
    )
    o = o.flatten(-2) + lepe.flatten(2).mT
    o = F.layer_norm(o, (C,), weights["ln.weight"], weights["ln.bias"], 1e-5) * F.silu(g)
    y = F.linear(o, weights["out_proj.weight"], weights["out_proj.bias"])
    return y.mT.unflatten(2, (height, width))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", GATES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_published_attention_module(name, dtype, backend):
    prefix = f"module/{name}/"
    case = {key.removeprefix(prefix): x for key, x in golden().items() if key.startswith(prefix)}
    weights = {
        key.removeprefix("state/"): x.to(dtype, copy=True).requires_grad_()
        for key, x in case.items()
        if key.startswith("state/")
    }
    x = case["x"].to(dtype, copy=True).requires_grad_()
    y = attention_module(x, weights, CASES[name], (case["cos"], case["sin"]), backend)
    output_gate, gradient_gate = GATES[dtype]
    assert error(y, case["y.f64"]) <= output_gate

    (y * case["projection"].to(dtype)).sum().backward()
    gradients = {"grad_x": x.grad} | {f"grad/{key}": weight.grad for key, weight in weights.items()}
    on_file = [key.removesuffix(".f64") for key in case if key.startswith("grad") and key.endswith(".f64")]
    assert len(on_file) > 5
    for key in on_file:
        assert error(gradients[key], case[f"{key}.f64"]) <= gradient_gate, key
