"""Two tokens, two dimensions: numbers that were worked out with pencil and paper."""

import math

import pytest
import torch
from op_cases import BACKENDS
from tolerances import EXACT

from nalaformer_hf.ops import nala_attention, nala_feature_maps


def rows(*values) -> torch.Tensor:
    """(1, T, 1, D) in float64."""
    return torch.tensor(values, dtype=torch.float64).view(1, len(values), 1, -1)


# d(q) = (0.6, -0.8), ||q|| = 5; norm_scale = 0 and τ = 1 make p = λ = 2: squares everywhere.
SQUARES = {"power": 2.0, "tau": 1.0, "norm_scale": 0.0}


def test_polarity_features():
    phi_q, phi_k = nala_feature_maps(rows((3, -4)), rows((2, -1)), form="polarity", **SQUARES)
    # [relu(-d) ; relu(d)]²
    torch.testing.assert_close(phi_q, rows((0, 0.64, 0.36, 0)), rtol=0, atol=EXACT)
    torch.testing.assert_close(phi_k, rows((0, 1, 4, 0)), rtol=0, atol=EXACT)


def test_cosine_features():
    # α d(q) = (0.6, -0.8) α with α such that tanh(0.6 α) = 1/3, so f = π/12 in the first dimension.
    gain = math.atanh(1 / 3) / 0.6
    second = math.pi / 4 * math.tanh(-0.8 * gain)
    phi_q, _ = nala_feature_maps(rows((3, -4)), rows((3, -4)), form="cosine", gain=gain, **SQUARES)
    cos_15, sin_15 = (math.sqrt(6) + math.sqrt(2)) / 4, (math.sqrt(6) - math.sqrt(2)) / 4
    expected = rows((0.36 * cos_15, 0.64 * math.cos(second), 0.36 * sin_15, 0.64 * math.sin(second)))
    torch.testing.assert_close(phi_q, expected, rtol=0, atol=EXACT)


def test_power_of_the_norm():
    # Eq. 8 at ||q|| = atanh(1/2): p = 3 (0.5 + 0.5) = 3, on d = (1, 0)
    norm = math.atanh(0.5)
    q = rows((norm * 0.6, norm * 0.8))
    phi_q, _ = nala_feature_maps(q, q, form="polarity")
    torch.testing.assert_close(phi_q, rows((0, 0, 0.216, 0.512)), rtol=0, atol=EXACT)


def test_baseline_features():
    q, k = rows((1, -2)), rows((-1, 3))
    relu, elu = nala_feature_maps(q, k, form="relu"), nala_feature_maps(q, k, form="elu")
    assert torch.equal(relu[0], rows((1, 0)))
    assert torch.equal(relu[1], rows((0, 3)))
    torch.testing.assert_close(elu[0], rows((2, math.exp(-2))), rtol=0, atol=EXACT)
    torch.testing.assert_close(elu[1], rows((math.exp(-1), 4)), rtol=0, atol=EXACT)


# φ_q = [0, 0.64, 0.36, 0], [0, 0, 0.36, 0.64]; φ_k = [0, 1, 4, 0], [0, 0, 1, 1]. Weights before division:
# q1·k1 = 0.64 + 1.44 = 2.08, q1·k2 = 0.36; q2·k1 = 1.44, q2·k2 = 1.
Q, K = rows((3, -4), (3, 4)), rows((2, -1), (1, 1))
V = rows((1, 10), (2, -10))


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal(backend):
    o, (S, z) = nala_attention(Q, K, V, form="polarity", **SQUARES, output_final_state=True, backend=backend)
    expected = rows((1, 10), ((1.44 * 1 + 1 * 2) / 2.44, (1.44 * 10 - 1 * 10) / 2.44))
    torch.testing.assert_close(o, expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(z[0, 0], torch.tensor([0, 1, 5, 1.0], dtype=z.dtype), rtol=0, atol=EXACT)
    wanted = torch.tensor([[0, 0], [1, 10], [6, 30], [2, -10]], dtype=S.dtype)
    torch.testing.assert_close(S[0, 0], wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_bidirectional_with_the_published_epsilon(backend):
    # ε is added to φ_q·mean(φ_k): 1.22 = (2.08 + 0.36) / 2 and again 1.22 = (1.44 + 1) / 2
    o, state = nala_attention(Q, K, V, form="polarity", **SQUARES, causal=False, eps=0.28, backend=backend)
    expected = rows(((2.08 + 0.72) / 3, (20.8 - 3.6) / 3), ((1.44 + 2) / 3, (14.4 - 10) / 3))
    torch.testing.assert_close(o, expected, rtol=0, atol=EXACT)
    assert state is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotary_turns_the_numerator_only(backend):
    # A quarter turn takes (φ_i, φ_{i+2}) to (-φ_{i+2}, φ_i): φ_q2 = [0, 0, 0.36, 0.64] of the second token
    # becomes [-0.36, -0.64, 0, 0], which meets φ_k1 = [0, 1, 4, 0] in -0.64; q2 and k2 turn together.
    cos, sin = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    o, _ = nala_attention(Q, K, V, form="polarity", **SQUARES, rotary=(cos, sin), backend=backend)
    expected = rows((1, 10), ((-0.64 * 1 + 1 * 2) / 2.44, (-0.64 * 10 - 1 * 10) / 2.44))
    torch.testing.assert_close(o, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_axial_rotary_turns_neighbours_within_each_half(backend):
    # D = 4. φ_q1 = φ_k1 = [0000 | 1000], not turned; φ_q2 = φ_k2 = [0000 | 0100], turned to
    # [0000 | -1000]: numerators q2·k1 = -1 and q2·k2 = 1, denominators 0 and 1.
    q = rows((1, 0, 0, 0), (0, 1, 0, 0))
    cos = torch.tensor([[1.0, 1, 1, 1], [0.0, 0, 1, 1]])
    sin = torch.tensor([[0.0, 0, 0, 0], [1.0, 1, 0, 0]])
    o, _ = nala_attention(q, q, V, form="polarity", rotary=(cos, sin), rotary_layout="axial", backend=backend)
    torch.testing.assert_close(o, rows((1, 10), (-1 + 2, -10 - 10)), rtol=0, atol=EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_goes_in_and_comes_out(backend):
    # An earlier key φ = [0, 0, 2, 0] with v = (5, 0) left S0 = φ vᵀ and z0 = φ; each query meets it in 0.72.
    z0 = torch.tensor([0, 0, 2.0, 0], dtype=torch.float64).view(1, 1, 4)
    S0 = z0.unsqueeze(-1) * torch.tensor([5.0, 0], dtype=torch.float64)
    o, _ = nala_attention(Q, K, V, form="polarity", **SQUARES, initial_state=(S0, z0), backend=backend)
    expected = rows(
        ((2.08 * 1 + 0.72 * 5) / 2.8, 20.8 / 2.8), ((1.44 * 1 + 1 * 2 + 0.72 * 5) / 3.16, (14.4 - 10) / 3.16)
    )
    torch.testing.assert_close(o, expected, rtol=0, atol=EXACT)
