"""Every kernel compiles ahead of time at its real tiles; what it takes of a device is read off the result."""

import pytest
import torch

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec

pytest.importorskip("triton")
from nalaformer_hf.ops.triton.plan import Tiles, block_of, make_plan, shared_bound
from nalaformer_hf.ops.triton.resources import DEVICES, TARGETS, Launch, compile_launch, launches

# Bytes that may spill (gfx942: vector registers) above D = 128; below nothing may.
WIDE_SPILLS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 320}
KERNELS = {"sums of k", "sums of q", "o", "dv", "dq", "dk", "scan", "dden", "decode"}


def plan_launches(
    target: str, form: str, rotary: str, D: int, dtype: torch.dtype, causal: bool = True
) -> list[Launch]:
    """Every kernel with all tiles that it may run with on a device."""
    plan = make_plan(FeatureSpec(form), D, D, dtype, DEVICES[target], rotary=rotary, causal=causal)
    found = list(launches(plan))
    widest = 16 if dtype == torch.float32 else 64
    names = KERNELS | {"sequential o"} if causal and widest >= D else KERNELS
    assert {launch.name for launch in found} == names
    return found


def check(launch: Launch, target: str, D: int, dtype: torch.dtype) -> None:
    """It compiles, and takes no more of the device than allowed."""
    allowed = 0 if D <= 128 else WIDE_SPILLS[dtype]
    shared = DEVICES[target].shared
    if D <= 128 and {"BT", "BV"} <= launch.constants.keys():
        sizes = launch.constants["BT"], launch.constants["BV"]
        tiles = Tiles(*sizes, launch.options["num_warps"], launch.options["num_stages"])
        shared = min(shared, shared_bound(tiles, block_of(D)))
    used = compile_launch(launch, dtype, target)
    assert 0 < used.registers <= (512 if target.startswith("gfx") else 255), launch
    assert used.spilled <= allowed, f"{launch}: {used}"
    assert used.shared <= shared, f"{launch}: {used}"


@pytest.mark.parametrize(
    ("target", "form", "rotary", "D"), [("sm_86", "cosine", "none", 128), ("sm_90", "polarity", "phase", 64)]
)
def test_kernels_fit_a_device(target, form, rotary, D):
    first = {}
    for launch in plan_launches(target, form, rotary, D, torch.bfloat16):
        first.setdefault(launch.name, launch)
    for launch in first.values():
        check(launch, target, D, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("D", [16, 24, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rotary", ["none", "phase", "axial"])
@pytest.mark.parametrize("form", ["cosine", "polarity"])
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_fit_every_device(target, form, rotary, D, dtype, causal):
    for launch in plan_launches(target, form, rotary, D, dtype, causal):
        check(launch, target, D, dtype)
