"""What the self-test of the kernels makes of the mode it runs in, and of what goes wrong."""

import pytest
import torch

pytest.importorskip("triton")
from nalaformer_hf.ops.triton.selftest import TOY, Check, collect

CPU = torch.device("cpu")


def test_it_sets_its_own_modes():
    def check(case, device):
        x = torch.rand(2, generator=torch.Generator())
        leaf = x.requires_grad_()
        (gradient,) = torch.autograd.grad((leaf @ leaf).float(), leaf)
        assert gradient.device == CPU
        yield Check(case, "dx", 0.0, 0.0)

    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        (result,) = collect(TOY[:1], check, CPU)
    assert result.passed, result.message


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [(RuntimeError("CUDA error: no kernel image"), False), (torch.OutOfMemoryError("full"), True)],
)
def test_a_full_gpu_is_no_failure_of_a_kernel(error, is_raised):
    def check(case, device):
        raise error

    if is_raised:
        with pytest.raises(torch.OutOfMemoryError):
            collect(TOY[:1], check, CPU)
        return
    (result,) = collect(TOY[:1], check, CPU)
    assert not result.passed
    assert result.message == f"RuntimeError: {error}"
