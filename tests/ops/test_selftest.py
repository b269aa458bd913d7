"""What the self-test of the kernels makes of the mode it runs in, and of what goes wrong."""

from subprocess import CalledProcessError

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
    [
        (RuntimeError("CUDA error: no kernel image"), False),
        (CalledProcessError(1, ["gcc"]), False),
        (PermissionError(13, "Permission denied: '/.triton'"), False),
        (ImportError("cannot import name 'chunk_delta_rule'"), False),
        (TypeError("got an unexpected keyword argument 'scale'"), False),
        (torch.OutOfMemoryError("full"), True),
    ],
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
    assert result.message == f"{type(error).__name__}: {error}"


def test_a_checkpoint_around_the_first_use_does_not_see_it():
    layer, tested = torch.nn.Linear(3, 3), []

    def check(case, device):
        leaf = torch.rand(2).requires_grad_()
        torch.autograd.grad(leaf.exp().square().sum(), leaf)
        yield Check(case, "dx", 0.0, 0.0)

    def forward(x):
        x = layer(x).square()
        if not tested:
            tested.extend(collect(TOY, check, CPU))
        return layer(x).square()

    checkpoint(forward, torch.rand(2, 3), use_reentrant=False).sum().backward()
    assert [result.passed for result in tested] == [True] * len(TOY)
    assert layer.weight.grad is not None


def test_the_default_dtype_of_the_process_is_not_its_own(monkeypatch):
    before = selftest._inputs(TOY[0], 1, 4), selftest._tables(TOY[0], 4)
    monkeypatch.setattr(selftest, "fused_step", lambda q, k, v, state, *args, **options: (v, state))
    monkeypatch.setattr(selftest, "step_attention", lambda q, k, v, state, *args, **options: (v, state))
    torch.set_default_dtype(torch.bfloat16)
    try:
        after = selftest._inputs(TOY[0], 1, 4), selftest._tables(TOY[0], 4)
        assert selftest._check_step(TOY[0], after[0], CPU).error == 0
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_all_tiles_of_a_plan_are_tested_on_a_gpu(monkeypatch):
    def check_attention(case, device, rows, T, prefix):
        yield Check(case, prefix + "o", 0.0, tuning._place)

    monkeypatch.setattr(selftest, "_check_attention", check_attention)
    monkeypatch.setattr(selftest, "_check_step", lambda case, *_: Check(case, "decode", 0.0, 0.0))
    *checks, _ = selftest._check(QUICK[0], torch.device("cuda", 0))
    names = ["o", "short o", "tiles 2, o", "tiles 2, short o"]
    assert [(check.name, check.milliseconds) for check in checks] == list(
        zip(names, [0, 0, 1, 1], strict=True)
    )
    assert tuning._place is None
