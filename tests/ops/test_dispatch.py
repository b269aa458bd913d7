"""Which backend runs: what "auto" picks, why "triton" cannot run, and what a self-test decides."""

import subprocess
import sys
import warnings

import pytest
import torch

from nalaformer_hf.ops import dispatch, resolve_backend

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "on a GPU, got cpu"),
        ({"device": "meta"}, "on a GPU, got meta"),
        ({"dtype": torch.float64}, "torch.bfloat16, torch.float32, got torch.float64"),
        ({"form": "elu"}, "'cosine', 'polarity', got 'elu'"),
        ({"head_dim": 257}, "head dim of q of at most 256, got 257"),
        ({"value_head_dim": 300}, "head dim of v of at most 256, got 300"),
    ],
)
def test_triton_says_why_it_cannot_run(changes, words):
    with pytest.raises(ValueError, match=f"backend: 'triton' cannot run here: .*{words}"):
        resolve_backend("triton", **{"device": CUDA, **changes})


def test_triton_runs_on_a_gpu():
    assert resolve_backend("triton", device=CUDA, dtype=torch.float16, head_dim=256) == "triton"


def test_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        resolve_backend("triton", device=CUDA)


def test_auto_says_once_why_a_gpu_runs_torch():
    dispatch._say_once.cache_clear()
    with pytest.warns(
        UserWarning, match="backend 'torch': it has the forms 'cosine', 'polarity', got 'relu'"
    ):
        assert resolve_backend("auto", device=CUDA, form="relu") == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend("auto", device=CUDA, form="relu") == "torch"
        assert resolve_backend("auto", device="cpu", form="relu") == "torch"


@pytest.fixture
def trust(monkeypatch, tmp_path):
    """The module, as on a GPU of which only the name is known."""
    trust = pytest.importorskip("nalaformer_hf.ops.triton.trust", reason="needs triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "_facts", lambda device: {"device": f"a GPU, {device.index}"})
    trust._why_not_trusted.cache_clear()
    dispatch._say_once.cache_clear()
    yield trust
    trust._why_not_trusted.cache_clear()


@pytest.mark.parametrize("error", [1e-3, float("inf"), float("nan")])
def test_auto_trusts_the_selftest_and_runs_it_once(trust, monkeypatch, error):
    runs = []

    def selftest(device, cases):
        runs.append(device)
        return [trust.Check(cases[0], "dq", error, 1.0)]

    monkeypatch.setattr(trust, "run_selftest", selftest)
    passed = error < 1
    wanted = "triton" if passed else "torch"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resolve_backend("auto", device=CUDA) == wanted
    assert ["self-test failed on this machine" in str(w.message) for w in caught] == [True] * (not passed)
    trust._why_not_trusted.cache_clear()  # as in the next process, which finds the result in its file
    assert resolve_backend("auto", device=CUDA) == wanted
    assert runs == [CUDA]
    assert resolve_backend("auto", device=torch.device("cuda", 1)) == wanted
    assert len(runs) == 2


def test_a_read_only_cache_is_said(trust, monkeypatch, tmp_path):
    (tmp_path / "nalaformer_hf").write_text("in the way")
    monkeypatch.setattr(trust, "run_selftest", lambda device, cases: [])
    with pytest.warns(UserWarning, match="will run again in the next process"):
        assert resolve_backend("auto", device=CUDA) == "triton"


def test_importing_the_package_leaves_triton_alone():
    code = (
        "import sys, nalaformer_hf, nalaformer_hf.ops; assert 'nalaformer_hf.ops.triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
