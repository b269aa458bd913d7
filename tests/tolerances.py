"""How far a form may be from the float64 reference: measured once, then frozen.

Errors are relative: the largest error to the largest value, and each row's error (its norm over the last
dimension) to that row's own norm.
"""

import torch
from torch import Tensor

# Two orders of the same sum in float64.
EXACT = 1e-10

# Log-likelihoods of one request in fp32, read in other pieces or beside other requests: absolute, in nats.
LOGLIKELIHOOD = 1e-4

# (form, dtype of q, k and v): tolerance of the outputs, of the gradients.
TOLERANCES = {
    ("cosine", torch.float32): (3e-6, 2e-5),
    ("polarity", torch.float32): (3e-6, 2e-5),
    ("relu", torch.float32): (3e-6, 1e-5),
    ("elu", torch.float32): (3e-6, 1e-5),
    # Rounding o's gradient leaves this much in a query's gradient, which is a small difference.
    ("cosine", torch.bfloat16): (4e-3, 5e-2),
    ("polarity", torch.bfloat16): (4e-3, 5e-2),
    ("relu", torch.bfloat16): (4e-3, 3e-2),
    ("elu", torch.bfloat16): (4e-3, 2e-2),
    ("cosine", torch.float16): (5e-4, 7e-3),
    ("polarity", torch.float16): (5e-4, 7e-3),
    ("relu", torch.float16): (5e-4, 4e-3),
    ("elu", torch.float16): (5e-4, 2e-3),
    # flash-linear-attention's kernels, which round states and updates to fp16 too.
    ("delta", torch.float16): (5e-3, 2e-2),
}

# The kernels multiply bf16 inputs as bf16: features, states and weights are rounded once more.
KERNEL_TOLERANCES = {
    ("cosine", torch.bfloat16): (2e-2, 5e-2),
    ("polarity", torch.bfloat16): (2e-2, 5e-2),
}
# They keep o in the dtype of v, as flash attention does; its rounding covers small rows of q's gradient.
KERNEL_ROW_FLOOR = 1e-1

# The error of a row smaller than this part of the largest is measured against that part.
ROW_FLOOR = 1e-2


def relative_errors(actual: Tensor, expected: Tensor, row_floor: float = ROW_FLOOR) -> tuple[float, float]:
    """(largest error / largest value, largest row error / row norm)."""
    expected = expected.detach().double()
    error = actual.detach().double() - expected
    norms = torch.linalg.vector_norm(expected, dim=-1)
    row_errors = torch.linalg.vector_norm(error, dim=-1) / norms.clamp_min(row_floor * float(norms.max()))
    return float(error.abs().max() / expected.abs().max()), float(row_errors.max())


def assert_close_rows(
    actual: Tensor, expected: Tensor, tolerance: float, name: str = "value", row_floor: float = ROW_FLOOR
) -> None:
    """Within `tolerance` of the largest value everywhere, and of each row's norm in each row."""
    _assert_close(actual, expected, (tolerance, tolerance), name, row_floor)


def _assert_close(
    actual: Tensor, expected: Tensor, tolerances: tuple[float, float], name: str, row_floor: float
) -> None:
    assert actual.shape == expected.shape, name
    assert actual.isfinite().all(), name
    largest, row = relative_errors(actual, expected, row_floor)
    assert largest <= tolerances[0], (
        f"{name}: {largest:.2e} of the largest value, allowed {tolerances[0]:.0e}"
    )
    assert row <= tolerances[1], f"{name}: {row:.2e} of a row's norm, allowed {tolerances[1]:.0e}"


def assert_close_kernel(
    actual: Tensor,
    expected: Tensor,
    form: str,
    dtype: torch.dtype,
    name: str,
    is_gradient: bool,
    rounded: Tensor | None = None,
) -> None:
    """`assert_close_rows` for what a fused kernel computed from inputs in `dtype`.

    Rotated weights have signs, and a row whose numerator cancels keeps the rounding of its terms. `rounded`
    is the reference with all rounded that a kernel must round; twice its error is allowed where that is more
    than the tolerance, as flash attention's tests do.
    """
    tolerance = KERNEL_TOLERANCES.get((form, dtype), TOLERANCES[form, dtype])[is_gradient]
    row_floor = ROW_FLOOR if dtype == torch.float32 else KERNEL_ROW_FLOOR
    attainable = (0.0, 0.0) if rounded is None else relative_errors(rounded, expected, row_floor)
    largest, row = (max(tolerance, 2 * error) for error in attainable)
    _assert_close(actual, expected, (largest, row), name, row_floor)
