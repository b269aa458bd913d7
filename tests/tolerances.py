"""How far a form may be from the float64 reference: measured once, then frozen.

Errors are relative: the largest error to the largest value, and each row's error (its norm over the last
dimension) to that row's own norm.
"""

from functools import partial

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

# The kernels multiply bf16 inputs as bf16, fp16 ones as tf32: features, states and weights are rounded once
# more. Operands cut to tf32 would make o 1e-3 too small.
KERNEL_TOLERANCES = {
    ("cosine", torch.bfloat16): (2e-2, 5e-2),
    ("polarity", torch.bfloat16): (2e-2, 5e-2),
    ("cosine", torch.float16): (8e-4, 7e-3),
    ("polarity", torch.float16): (8e-4, 7e-3),
}
# The error of a row smaller than this part of the largest is measured against that part.
ROW_FLOOR = 1e-2


def relative_errors(
    actual: Tensor, expected: Tensor, row_floor: float = ROW_FLOOR, terms: Tensor | None = None
) -> tuple[float, float]:
    """(largest error / largest value, largest row error / row norm); of the sum's `terms` where larger."""
    expected = expected.detach().double()
    error = actual.detach().double() - expected
    sizes = expected.abs() if terms is None else torch.maximum(expected.abs(), terms.detach().abs())
    norms = torch.linalg.vector_norm(sizes, dim=-1)
    row_errors = torch.linalg.vector_norm(error, dim=-1) / norms.clamp_min(row_floor * float(norms.max()))
    return float(error.abs().max() / sizes.max()), float(row_errors.max())


def assert_close_rows(
    actual: Tensor, expected: Tensor, tolerance: float, name: str = "value", row_floor: float = ROW_FLOOR
) -> None:
    """Within `tolerance` of the largest value everywhere, and of each row's norm in each row."""
    _assert_errors(actual, expected, relative_errors(actual, expected, row_floor), (tolerance,) * 2, name)


def assert_close_kernel(
    actual: Tensor,
    expected: Tensor,
    form: str,
    dtype: torch.dtype,
    name: str,
    is_gradient: bool,
    rounded: Tensor | None = None,
    terms: Tensor | None = None,
) -> None:
    """`assert_close_rows` for what a fused kernel computed from inputs in `dtype`.

    A small difference of large numbers keeps the rounding of those: it is measured against `terms`. `rounded`
    is the reference with all rounded that a kernel must round; twice its error in outputs and three times in
    gradients are allowed where that is more than the tolerance, as flash attention's tests do.
    """
    tolerance = KERNEL_TOLERANCES.get((form, dtype), TOLERANCES[form, dtype])[is_gradient]
    measure = partial(relative_errors, expected=expected, terms=terms)
    attainable = (0.0, 0.0) if rounded is None else measure(rounded)
    largest, row = (max(tolerance, (2 + is_gradient) * error) for error in attainable)
    _assert_errors(actual, expected, measure(actual), (largest, row), name)


def _assert_errors(
    actual: Tensor, expected: Tensor, errors: tuple[float, float], tolerances: tuple[float, ...], name: str
) -> None:
    assert actual.shape == expected.shape, name
    assert actual.isfinite().all(), name
    for error, allowed, of in zip(errors, tolerances, ("the largest value", "a row's norm"), strict=True):
        assert error <= allowed, f"{name}: error {error:.2e} of {of}, allowed {allowed:.0e}"
