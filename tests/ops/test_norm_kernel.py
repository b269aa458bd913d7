"""Norm and gate in flash-linear-attention's kernel are norm and gate."""

import pytest
import torch
from interpreted_fla import needs_fla

from nalaformer_hf.ops.triton.gated_norm import FULL, run_norm_selftest

pytestmark = [needs_fla, pytest.mark.xdist_group("interpreter")]
NAMES = ["o", "dx", "dgate", "dweight"]


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]
)
def test_the_selftest_passes(interpret, dtype, allowed):
    """Both norms, in the kernels of narrow and of wide ones."""
    cases = [("layer_norm", dtype, 40), ("head_rms_norm", dtype, 24), ("layer_norm", dtype, 520)]
    results = interpret("norm_kernel_cases", "selftest", *cases)
    expected = [("layer_norm", name) for name in [*NAMES, "dbias"]]
    expected += [("head_rms_norm", name) for name in NAMES]
    assert [result[:2] for result in results] == expected + expected[:5]
    assert all(passed and error < allowed for *_, error, passed in results), results


def test_the_selftest_catches_a_broken_kernel(interpret):
    results = interpret("norm_kernel_cases", "selftest", ("layer_norm", torch.float32, 40), broken=True)
    assert [name for _, name, _, passed in results if not passed] == ["dgate"]


@pytest.mark.gpu
def test_on_a_gpu():
    checks = run_norm_selftest(torch.device("cuda"), FULL)
    assert len(checks) == 18
    assert all(check.passed for check in checks), checks
