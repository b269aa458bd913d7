"""The fused kernels in Triton's interpreter: outputs, states and every gradient are the reference's."""

from itertools import product

import pytest
import torch

pytestmark = pytest.mark.xdist_group("interpreter")

PACKED = [0, 0, 3, 70, 70, 130, 130]
PACKED_SHORT = [0, 1, 1, 40, 63]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Every value of each column, and most pairs of them: form, T, dtype, rotary, causal, D, V, bounds, state,
# and whether the forward is the sequential kernel.
SAMPLE = [
    ("cosine", 1, F32, "phase", True, 16, 8, None, True, True),
    ("polarity", 63, F32, None, True, 16, 24, PACKED_SHORT, False, True),
    ("cosine", 64, BF16, None, True, 16, 40, None, False, False),
    ("polarity", 65, F16, "phase", True, 24, 8, None, True, True),
    ("cosine", 130, F32, "phase", True, 24, 40, PACKED, True, False),
    ("cosine", 130, BF16, "phase", True, 16, 40, PACKED, True, True),
    ("cosine", 130, F16, None, True, 16, 24, None, True, False),
    ("polarity", 130, BF16, "axial", True, 16, 8, PACKED, True, False),
    ("cosine", 63, BF16, "phase", False, 24, 16, PACKED_SHORT, False, False),
    ("polarity", 130, F32, "axial", False, 24, 40, None, False, False),
    ("cosine", 65, F32, None, False, 16, 8, None, False, False),
    ("polarity", 1, F16, None, False, 16, 40, None, False, False),
]
NAMES = ("form", "T", "dtype", "rotary", "causal", "D", "V", "bounds", "has_state", "sequential")


@pytest.mark.parametrize("values", SAMPLE, ids=lambda v: "-".join(str(x) for x in v).replace("torch.", ""))
def test_kernels_are_the_reference(interpret, values):
    interpret("kernel_cases", "check_kernels", **dict(zip(NAMES, values, strict=True)))


@pytest.mark.parametrize(("causal", "sequential"), [(True, True), (True, False), (False, False)])
def test_each_row_may_have_rotary_tables_of_its_own(interpret, causal, sequential):
    options = {"D": 16, "V": 8, "H": 1, "dtype": F32, "rotary": "phase", "own_tables": True}
    interpret("kernel_cases", "check_kernels", "cosine", 40, True, sequential, causal=causal, **options)


def test_axial_rotary_of_wide_heads(interpret):
    options = {"D": 40, "V": 16, "B": 1, "H": 1, "dtype": F32, "rotary": "axial", "causal": False}
    interpret("kernel_cases", "check_kernels", "polarity", 49, **options)


@pytest.mark.parametrize(
    ("form", "rotary", "dtype", "D", "V", "in_place"),
    [
        ("cosine", None, F32, 16, 40, True),
        ("cosine", "phase", BF16, 24, 8, False),
        ("polarity", "axial", F16, 24, 40, True),
    ],
)
def test_decode_kernel_continues_a_prefill(interpret, form, rotary, dtype, D, V, in_place):
    interpret("kernel_cases", "check_step", form, rotary, dtype, D, V, in_place)


@pytest.mark.parametrize("form", ["cosine", "polarity"])
@pytest.mark.parametrize("check", ["check_zero_rows", "check_extremes", "check_nan"])
def test_numeric_rules(interpret, form, check):
    interpret("kernel_cases", check, form)


def test_when_the_forward_is_sequential(interpret):
    interpret("kernel_cases", "check_when_sequential")


def test_saved_memory(interpret):
    interpret("kernel_cases", "check_saved_memory")
    interpret("kernel_cases", "check_what_hooks_put_away")


@pytest.mark.slow
@pytest.mark.parametrize(("D", "V"), [(64, 40), (96, 128), (256, 256)])
def test_kernels_over_many_chunks(interpret, D, V):
    bounds = [0, 300, 300, 301, 560]
    options = {"D": D, "V": V, "H": 1, "dtype": F32, "rotary": "phase", "bounds": bounds}
    interpret("kernel_cases", "check_kernels", "cosine", 560, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "rotary"), list(product(("cosine", "polarity"), (None, "phase", "axial"))))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("D", "V"), [(16, 24), (24, 16), (64, 40), (96, 128)])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_kernels_on_the_full_grid(interpret, form, rotary, causal, D, V, T, has_state, sequential, dtype):
    if has_state and not causal:
        pytest.skip("a bidirectional sum has no state")
    if sequential and (not causal or D > 64 or (D > 16 and dtype == F32)):
        pytest.skip("the sequential kernel is causal, and for narrow heads")
    bounds = [0, 0, T // 2, T // 2, T] if T > 1 else None
    for cut in (None, bounds):
        options = {"D": D, "V": V, "H": 1, "dtype": dtype, "rotary": rotary, "causal": causal, "bounds": cut}
        interpret("kernel_cases", "check_kernels", form, T, has_state, sequential, **options)
