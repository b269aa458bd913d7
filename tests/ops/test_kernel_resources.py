"""Every kernel compiles ahead of time at its real tiles; what it takes of a device is read off the result."""

import pytest
import torch

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec

pytest.importorskip("triton")
from nalaformer_hf.ops.triton.plan import block_of, make_plan
from nalaformer_hf.ops.triton.resources import SHARED_LIMITS, TARGETS, compile_launch, launches

# Bytes that may spill: none up to D = 128, but for what a compiler trades for more blocks at a time on sm_100
# (16 bytes of 128 registers), and on gfx942, whose tiles nobody has tuned (vector registers).
SPILLS = {"sm_100": 16, "gfx942": 512}
WIDE_SPILLS = 128  # above D = 128
FP32_SPILLS = {128: 64, 256: 512}  # three tf32 products hold both parts of each operand in registers
NUM_LAUNCHES = 9


def check(target: str, form: str, rotary: str, D: int, dtype: torch.dtype, causal: bool = True) -> None:
    plan = make_plan(
        FeatureSpec(form), D, D, dtype, rotary=rotary, causal=causal, is_hip=target.startswith("gfx")
    )
    all_launches = list(launches(plan))
    assert len(all_launches) == NUM_LAUNCHES
    allowed = SPILLS.get(target, 0) if D <= 128 else WIDE_SPILLS
    if dtype == torch.float32:
        allowed = max(allowed, FP32_SPILLS.get(block_of(D), 0))
    for launch in all_launches:
        used = compile_launch(launch, dtype, target)
        assert 0 < used.registers <= (512 if target.startswith("gfx") else 255), launch.name
        assert used.spilled <= allowed, f"{launch.name}: {used}"
        assert used.shared <= SHARED_LIMITS[target], f"{launch.name}: {used}"


@pytest.mark.parametrize(
    ("target", "form", "rotary", "D"), [("sm_86", "cosine", "none", 128), ("sm_90", "polarity", "phase", 64)]
)
def test_kernels_fit_a_device(target, form, rotary, D):
    check(target, form, rotary, D, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("D", [16, 24, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rotary", ["none", "phase", "axial"])
@pytest.mark.parametrize("form", ["cosine", "polarity"])
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_fit_every_device(target, form, rotary, D, dtype, causal):
    check(target, form, rotary, D, dtype, causal)
