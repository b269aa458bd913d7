"""The delta rules on flash-linear-attention's kernels are the delta rules."""

import pytest
import torch
from interpreted_fla import needs_fla
from tolerances import TOLERANCES, assert_close_rows

from nalaformer_hf.ops.triton.delta_selftest import FULL, run_delta_selftest

NAMES = ["o", "S", "dq", "dk", "dv", "dbeta", "dS"]
pytestmark = pytest.mark.xdist_group("interpreter")


@needs_fla
def test_the_selftest_passes_and_catches_a_broken_kernel(interpret):
    cases = [(False, torch.float16, 2, 32, 16), (True, torch.float16, 1, 48, 24)]
    results = interpret("delta_kernel_cases", "selftest", *cases)
    expected = [("delta", name) for name in [*NAMES, "decode"]]
    expected += [("gated_delta", name) for name in [*NAMES, "dlog_decay", "decode"]]
    assert [result[:2] for result in results] == expected
    assert all(passed for *_, passed in results), results
    assert all(error < 1e-6 for _, name, error, _ in results if name == "decode"), results
    broken = interpret("delta_kernel_cases", "selftest", cases[1], broken=True)
    assert [name for _, name, _, passed in broken if not passed] == ["decode"]


@needs_fla
@pytest.mark.parametrize("gated", [False, True])
def test_packed_sequences(interpret, gated):
    """Empty ones keep their state."""
    results = interpret("delta_kernel_cases", "packed", [5, 0, 67, 1, 0], gated)
    assert list(results) == NAMES + ["dlog_decay"] * gated
    for name, (actual, expected) in results.items():
        tolerance = TOLERANCES["delta", torch.float16][name.startswith("d")]
        assert_close_rows(actual, expected, tolerance, name, row_floor=1e-1)


@needs_fla
@pytest.mark.gpu
def test_on_a_gpu():
    checks = run_delta_selftest(torch.device("cuda"), FULL)
    assert len(checks) == 34
    assert all(check.passed for check in checks), checks
