"""What the self-test of the kernels makes of the mode it runs in, and of what goes wrong."""

import pytest
import torch

pytest.importorskip("triton")
from nalaformer_hf.ops.triton import selftest, tuning
from nalaformer_hf.ops.triton.selftest import QUICK, TOY, Check, collect

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


def test_all_tiles_of_a_plan_are_tested_on_a_gpu(monkeypatch):
    def check_attention(case, device, rows, T, prefix):
        yield Check(case, prefix + "o", 0.0, tuning._place)

    monkeypatch.setattr(selftest, "_check_attention", check_attention)
    monkeypatch.setattr(selftest, "_check_step", lambda case, *_: Check(case, "decode", 0.0, 0.0))
    *checks, _ = selftest._check(QUICK[0], torch.device("cuda", 0))
    names = ["o", "short o", "tiles 2, o", "tiles 2, short o", "tiles 3, o", "tiles 3, short o"]
    assert [(check.name, check.milliseconds) for check in checks] == list(
        zip(names, [0, 0, 1, 1, 2, 2], strict=True)
    )
    assert tuning._place is None
