"""Feature maps inside a kernel (Eq. 8 and 16, turned by π/4), their rotation and their gradients.

The formulas are those of `modeling/feature_maps_nala.py`, on tiles (tokens, dims) of one head in fp32; the
two halves of the features stand in two tiles. Dims and tokens beyond the end hold zeros, whose features are
zero.
"""

import triton
import triton.language as tl

# 1 / the smallest denominator whose inverse is used: tiny / eps of fp32.
TINY: tl.constexpr = tl.constexpr(9.8607613e-32)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
PI: tl.constexpr = tl.constexpr(3.141592653589793)


@triton.jit
def reciprocal(den):
    """1 / den, and 0 where den is too small to have one; NaN stays NaN."""
    too_small = tl.abs(den) < TINY
    return tl.where(too_small, 0.0, 1.0 / tl.where(too_small, 1.0, den))


@triton.jit
def _raise(a, exponent):
    """a^exponent for a ≥ 0, with 0^exponent = 0."""
    return tl.where(a == 0, 0.0, tl.exp2(exponent * tl.log2(tl.where(a == 0, 1.0, a))))


@triton.jit
def _key_amplitude(a, POWER: tl.constexpr):
    """|k|^λ; the default λ = 3 needs no logarithm."""
    if POWER == 3.0:
        return a * a * a
    else:
        return _raise(a, POWER)


@triton.jit
def _sin_cos_eighth(x):
    """sin(π/2 x) and cos(π/2 x) for 0 ≤ x ≤ 1/2 by their series: exact to fp32, without range reduction."""
    y = x * (PI / 2)
    s = y * y
    sine = 1.0 + s * (-1.6666667e-1 + s * (8.3333333e-3 + s * (-1.9841270e-4 + s * 2.7557319e-6)))
    cosine = 1.0 + s * (
        -0.5 + s * (4.1666667e-2 + s * (-1.3888889e-3 + s * (2.4801587e-5 - s * 2.7557319e-7)))
    )
    return y * sine, cosine


@triton.jit
def direction(x):
    """d(x) and 1 / ||x||, both zero where the norm is zero."""
    norm = tl.sqrt(tl.sum(x * x, axis=1))
    inverse = tl.where(norm == 0, 0.0, 1.0 / tl.where(norm == 0, 1.0, norm))
    return x * inverse[:, None], inverse, norm


@triton.jit
def query_power(norm, POWER: tl.constexpr, TAU: tl.constexpr, NORM_SCALE: tl.constexpr):
    """p = λ (τ + tanh(s ||q||)) and dp / d||q||."""
    u = tl.exp(-2.0 * NORM_SCALE * norm)
    slope = (4.0 * POWER * NORM_SCALE) * u / ((1.0 + u) * (1.0 + u))
    return POWER * (TAU + (1.0 - u) / (1.0 + u)), slope


@triton.jit
def _waves(d, FORM: tl.constexpr, GAIN: tl.constexpr):
    """w₁, w₂ of the form and, for the cosine form, the slope df / dd."""
    if FORM == "polarity":
        return tl.where(d < 0, 1.0, 0.0), tl.where(d > 0, 1.0, 0.0), 0.0
    else:
        e = tl.exp(-2.0 * GAIN * tl.abs(d))
        larger = 1.0 / (1.0 + e)
        smaller = e * larger
        sine, cosine = _sin_cos_eighth(smaller)
        positive = d > 0
        slope = (PI * GAIN) * smaller * larger
        return tl.where(positive, sine, cosine), tl.where(positive, cosine, sine), slope


@triton.jit
def features(
    x,
    IS_QUERY: tl.constexpr,
    FORM: tl.constexpr,
    POWER: tl.constexpr,
    TAU: tl.constexpr,
    GAIN: tl.constexpr,
    NORM_SCALE: tl.constexpr,
):
    """Both halves of φ_q or φ_k of a tile x."""
    d, _, norm = direction(x)
    if IS_QUERY:
        power, _ = query_power(norm, POWER, TAU, NORM_SCALE)
        amplitude = _raise(tl.abs(d), power[:, None])
    else:
        amplitude = _key_amplitude(tl.abs(x), POWER)
    first, second, _ = _waves(d, FORM, GAIN)
    return amplitude * first, amplitude * second


@triton.jit
def _through_direction(grad, d, inverse):
    """Gradient through x / ||x||: (g - d (d·g)) / ||x||."""
    return (grad - d * tl.sum(grad * d, axis=1)[:, None]) * inverse[:, None]


@triton.jit
def features_grad(
    x,
    grad1,
    grad2,
    IS_QUERY: tl.constexpr,
    FORM: tl.constexpr,
    POWER: tl.constexpr,
    TAU: tl.constexpr,
    GAIN: tl.constexpr,
    NORM_SCALE: tl.constexpr,
):
    """Gradient of `features` to x, from the gradients of both halves."""
    d, inverse, norm = direction(x)
    first, second, angle_slope = _waves(d, FORM, GAIN)
    if IS_QUERY:
        power, power_slope = query_power(norm, POWER, TAU, NORM_SCALE)
        base = d
        exponent = power[:, None]
        amplitude = _raise(tl.abs(d), exponent)
    else:
        base = x
        exponent = POWER
        amplitude = _key_amplitude(tl.abs(x), POWER)
    # weighted = A · d(loss)/dA, and d|b|^p/db = p |b|^p / b
    weighted = amplitude * (grad1 * first + grad2 * second)
    grad_base = tl.where(base != 0, exponent * weighted / tl.where(base != 0, base, 1.0), 0.0)
    if FORM == "cosine":
        grad_direction = amplitude * angle_slope * (grad2 * first - grad1 * second)
    else:
        grad_direction = tl.zeros_like(d)
    if IS_QUERY:
        grad_direction += grad_base
        log_direction = tl.log2(tl.where(d != 0, tl.abs(d), 1.0)) * LN2
        grad_norm = tl.sum(weighted * log_direction, axis=1) * power_slope
        return _through_direction(grad_direction, d, inverse) + d * grad_norm[:, None]
    elif FORM == "cosine":
        return _through_direction(grad_direction, d, inverse) + grad_base
    else:
        return grad_base


@triton.jit
def _turn_pairs(x):
    """(x_2i, x_2i+1) to (-x_2i+1, x_2i)."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(-odd, even), (x.shape[0], x.shape[1]))


@triton.jit
def rotate(first, second, cos, sin, ROTARY: tl.constexpr):
    """Rotary embedding φ cos + J(φ) sin: "phase" turns (φ_i, φ_{i+D}), "axial" the pairs of each half."""
    if ROTARY == "phase":
        return first * cos - second * sin, second * cos + first * sin
    elif ROTARY == "axial":
        return first * cos + _turn_pairs(first) * sin, second * cos + _turn_pairs(second) * sin
    else:
        return first, second


@triton.jit
def rotate_back(first, second, cos, sin, ROTARY: tl.constexpr):
    """The adjoint of `rotate`, for gradients."""
    if ROTARY == "phase":
        return first * cos + second * sin, second * cos - first * sin
    elif ROTARY == "axial":
        return first * cos - _turn_pairs(first * sin), second * cos - _turn_pairs(second * sin)
    else:
        return first, second
