"""Which tiles a kernel may run with on a device, and which of them it takes."""

from types import SimpleNamespace

import pytest
import torch

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec

pytest.importorskip("triton")
from nalaformer_hf.ops.triton import tuning
from nalaformer_hf.ops.triton.plan import MAX_CANDIDATES, Tiles, make_plan, shared_bound
from nalaformer_hf.ops.triton.resources import DEVICES

FAST, SLOW = Tiles(32, 64, 8), Tiles(16, 64, 8)
LARGE = tuning.SMALL


@pytest.mark.parametrize("D", [16, 64, 128, 256])
@pytest.mark.parametrize("device", list(DEVICES))
def test_candidates_fit_into_shared_memory(device, D):
    plan = make_plan(FeatureSpec(), D, D, torch.bfloat16, DEVICES[device])
    for candidates in (plan.sums, plan.outputs, plan.gradients):
        assert MAX_CANDIDATES >= len(candidates) == len(set(candidates)) > 0
        assert all(plan.chunk_size % tiles.BT == 0 for tiles in candidates)
        if D <= 128:
            assert all(shared_bound(tiles, D) <= DEVICES[device].shared for tiles in candidates)


@pytest.mark.parametrize(
    ("device", "rotary", "is_there"),
    [("sm_90", "none", True), ("sm_86", "none", False), ("sm_86", "phase", True), ("gfx942", "phase", False)],
)
def test_loads_ahead_need_shared_memory(device, rotary, is_there):
    plan = make_plan(FeatureSpec(), 64, 64, torch.bfloat16, DEVICES[device], rotary=rotary)
    assert any(tiles.num_stages > 1 for tiles in plan.outputs) == is_there


def test_the_interpreter_has_one_candidate(interpret):
    interpret("kernel_cases", "check_one_candidate")


@pytest.fixture
def launched(monkeypatch) -> list[Tiles]:
    """The tiles that were timed; `FAST` are faster."""
    timed = []

    def do_bench(launch, **options):
        launch()
        return 1.0 if timed[-1] == FAST else 2.0

    monkeypatch.setattr(tuning, "do_bench", do_bench)
    monkeypatch.setattr(tuning, "_fastest", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return timed


@pytest.mark.parametrize("candidates", [(FAST, SLOW), (SLOW, FAST)])
def test_the_fastest_candidate_is_measured_once(launched, candidates):
    for work in (LARGE, LARGE, 1):
        assert tuning.fastest(launched.append, candidates, key="a", work=work) == FAST
    assert launched == list(candidates)
    assert tuning.fastest(launched.append, (SLOW,), key="b", work=LARGE) == SLOW
    assert launched == list(candidates)


def test_the_first_candidate_is_taken_where_nothing_is_measured(launched, monkeypatch):
    assert tuning.fastest(launched.append, (SLOW, FAST), key="a", work=LARGE - 1) == SLOW
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.fastest(launched.append, (SLOW, FAST), key="a", work=LARGE) == SLOW
    assert launched == []


def test_the_first_candidate_is_taken_where_memory_does_not_suffice_to_measure(launched, monkeypatch):
    def do_bench(launch, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(tuning, "do_bench", do_bench)
    assert tuning.fastest(launched.append, (SLOW, FAST), key="a", work=LARGE) == SLOW


def test_deterministic_algorithms_take_the_first_candidate(launched):
    assert tuning.fastest(launched.append, (SLOW, FAST), key="a", work=LARGE) == FAST
    torch.use_deterministic_algorithms(True)
    try:
        assert tuning.fastest(launched.append, (SLOW, FAST), key="a", work=LARGE) == SLOW
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_named_candidate_is_taken_and_nothing_measured(launched):
    for place, tiles in ((0, SLOW), (1, FAST), (2, FAST)):
        with tuning.candidate(place):
            assert tuning.fastest(launched.append, (SLOW, FAST), key="a", work=LARGE) == tiles
    assert launched == []
    assert tuning.fastest(launched.append, (SLOW, FAST), key="a", work=LARGE - 1) == SLOW


@pytest.mark.parametrize(("spills", "is_hip"), [(0, False), (2, False), (2, True)])
def test_a_kernel_that_spills_gets_more_registers(monkeypatch, spills, is_hip):
    monkeypatch.setattr(tuning, "_spilled", set())
    launched = []

    def launch(tiles: Tiles) -> SimpleNamespace:
        launched.append(tiles)
        return SimpleNamespace(n_spills=0 if tiles.max_registers else spills)

    options = {"key": "a", "work": 1, "is_hip": is_hip}
    for _ in range(3):
        tuning.launch_fastest(launch, (FAST,), **options)
    roomy = FAST._replace(max_registers=255)
    assert launched == ([FAST] * 3 if is_hip or not spills else [FAST, roomy, roomy, roomy])
    plan = make_plan(FeatureSpec(), 64, 64, torch.bfloat16, DEVICES["sm_90"])
    assert "maxnreg" not in plan.options(FAST)
    assert plan.options(roomy)["maxnreg"] == 255
