"""Which backend runs: what "auto" picks, why "triton" cannot run, and what a self-test decides."""

import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nalaformer_hf.ops import dispatch, resolve_backend

CUDA = torch.device("cuda", 0)
NORMS = ("layer_norm", "head_rms_norm")


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


def on_gpu(dtype: torch.dtype, width: int) -> SimpleNamespace:
    """What dispatch looks at in a tensor, without a GPU."""
    return SimpleNamespace(device=CUDA, dtype=dtype, shape=(2, 5, 3, width))


@pytest.fixture
def fla(monkeypatch):
    """As if flash-linear-attention were installed, and had failed nowhere."""
    monkeypatch.setattr(dispatch, "fla_version", lambda: "0.6.0")
    dispatch._say_once.cache_clear()


@pytest.mark.parametrize(
    ("version", "changes", "words"),
    [
        (None, {}, "not installed .pip install 'nalaformer-hf.kernels.'"),
        ("0.5.1", {}, "fla-core 0.6 or newer, got 0.5.1"),
        ("0.6.0", {"device": torch.device("cpu")}, "on a GPU, got cpu"),
        ("0.6.0", {"dtype": torch.float32}, "torch.float16, torch.bfloat16, got torch.float32"),
        ("0.6.0", {"key_width": 258}, "up to 256 wide, got 258"),
    ],
)
def test_fla_says_why_it_cannot_run(version, changes, words, monkeypatch):
    monkeypatch.setattr(dispatch, "fla_version", lambda: version)
    reason = dispatch.why_not_fla_delta(
        **{"device": CUDA, "dtype": torch.bfloat16, "key_width": 256, **changes}
    )
    assert re.search(words, reason)


def test_delta_mixers_say_once_why_a_gpu_runs_torch(fla):
    k, v = on_gpu(torch.float32, 32), on_gpu(torch.float32, 16)
    with pytest.warns(UserWarning, match="delta rule on its torch form: .*got torch.float32"):
        assert dispatch.fused_delta_forms(k, v, gated=True) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.fused_delta_forms(k, v, gated=True) is None
        assert dispatch.fused_delta_forms(*torch.zeros(2, 1, 4, 2, 8), gated=True) is None


@pytest.fixture
def trust(monkeypatch, tmp_path):
    """The module, as on a GPU of which only the name is known."""
    trust = pytest.importorskip("nalaformer_hf.ops.triton.trust", reason="needs triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "_facts", lambda device: {"device": f"a GPU, {device.index}"})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
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


@pytest.mark.parametrize("passed", [True, False])
def test_delta_mixers_trust_their_own_selftest(fla, trust, monkeypatch, passed):
    cases = []

    def selftest(device, tested):
        cases.extend(tested)
        return [trust.Check(tested[0], "dq", 1e-3 if passed else 1.0, 1.0)]

    monkeypatch.setattr(trust, "run_delta_selftest", selftest)
    k, v = on_gpu(torch.float32, 32), on_gpu(torch.bfloat16, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert (dispatch.fused_delta_forms(k, v, gated=False) is not None) == passed
        trust._why_not_trusted.cache_clear()  # as in the next process
        assert (dispatch.fused_delta_forms(k, v, gated=False) is not None) == passed
        assert (dispatch.fused_delta_forms(k, v, gated=True) is not None) == passed
    said = [f"self-test failed on this machine ({mixer}, bf" for mixer in ("delta", "gated_delta")]
    assert len(caught) == (0 if passed else 2)
    assert all(words in str(w.message) for w, words in zip(caught, said, strict=False))
    assert [tuple(case) for case in cases] == [(gated, torch.bfloat16, 3, 32, 16) for gated in (False, True)]


@pytest.mark.parametrize("passed", [True, False])
def test_fused_norms_trust_their_own_selftest(fla, trust, monkeypatch, passed):
    cases = []

    def selftest(device, tested):
        cases.extend(tested)
        return [trust.Check(tested[0], "dx", 1e-3 if passed else 1.0, 1.0)]

    monkeypatch.setattr(trust, "run_norm_selftest", selftest)
    x, gate = on_gpu(torch.float32, 48), on_gpu(torch.bfloat16, 48)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for norm in ("layer_norm", "head_rms_norm", "layer_norm"):
            assert (dispatch.fused_gated_norm(x, gate, norm) is not None) == passed
    said = [f"fuse_norm in torch: the kernels' self-test failed on this machine ({x} and gate" for x in NORMS]
    assert [words in str(w.message) for w, words in zip(caught, said, strict=not passed)] == [True] * len(
        caught
    )
    assert [tuple(case) for case in cases] == [(norm, torch.bfloat16, 48) for norm in NORMS]


def test_fused_norms_say_why_they_run_in_torch(fla):
    for x, gate, words in (
        (on_gpu(torch.float32, 20_000), on_gpu(torch.float32, 20_000), "up to 16384 channels, got 20000"),
        (on_gpu(torch.float64, 16), on_gpu(torch.float64, 16), "torch.float32, got torch.float64"),
    ):
        with pytest.warns(UserWarning, match=f"fuse_norm in torch: .*{words}"):
            assert dispatch.fused_gated_norm(x, gate, "layer_norm") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.fused_gated_norm(torch.zeros(2, 8), torch.zeros(2, 8), "layer_norm") is None


def test_an_error_of_earlier_work_is_no_result(trust, monkeypatch):
    def synchronize(device):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(trust, "run_selftest", lambda device, cases: [])
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", synchronize)
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            resolve_backend("auto", device=CUDA)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="a CUDA graph cannot record"):
            resolve_backend("auto", device=CUDA)
    assert not trust.record_path(CUDA, "linear").exists()
    assert resolve_backend("auto", device=CUDA) == "triton"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    trust._why_not_trusted.cache_clear()  # with a result on file, nothing has to be tested
    assert resolve_backend("auto", device=CUDA) == "triton"


def test_a_failure_keeps_its_message_and_no_file(trust, monkeypatch):
    trust.record(CUDA, "linear", [trust.Check(trust.QUICK[0], "o", 0.0, 1.0)])
    assert trust.record_path(CUDA, "linear").exists()
    trust.record_path(CUDA, "linear").write_text("")  # as if it had never been finished
    check = trust.Check(trust.QUICK[0], "compilation or launch", float("inf"), 0.0, "no C compiler")
    monkeypatch.setattr(trust, "run_selftest", lambda device, cases: [check])
    with pytest.warns(UserWarning, match="compilation or launch no C compiler"):
        assert resolve_backend("auto", device=CUDA) == "torch"
    assert not trust.record_path(CUDA, "linear").exists()  # a compiler may be installed by the next process


def test_a_read_only_cache_is_said(trust, monkeypatch, tmp_path):
    (tmp_path / "nalaformer_hf").write_text("in the way")
    monkeypatch.setattr(trust, "run_selftest", lambda device, cases: [])
    with pytest.warns(UserWarning, match="will run again in the next process"):
        assert resolve_backend("auto", device=CUDA) == "triton"


def test_without_a_home_the_selftest_runs_each_time(trust, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(trust.Path, "home", home)
    monkeypatch.setattr(trust, "run_selftest", lambda device, cases: [])
    with pytest.warns(UserWarning, match="next process: there is no home directory; set HOME"):
        assert resolve_backend("auto", device=CUDA) == "triton"


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), None])
def test_a_result_that_cannot_be_read_is_made_again(trust, monkeypatch, error):
    runs, path = [], trust.record_path(CUDA, "linear")
    path.parent.mkdir()
    path.write_text("")
    monkeypatch.setattr(trust, "run_selftest", lambda device, cases: runs.append(device) or [])
    with monkeypatch.context() as patch:
        if error is not None:  # as in the home of another user
            patch.setattr(trust.Path, "stat", mock.Mock(side_effect=error))
            patch.setattr(trust.Path, "read_text", mock.Mock(side_effect=error))
            patch.setattr(trust.Path, "mkdir", mock.Mock(side_effect=error))
        said = pytest.warns(UserWarning, match="again .* Permission denied")
        with nullcontext() if error is None else said:
            assert resolve_backend("auto", device=CUDA) == "triton"
    assert runs == [CUDA]


def test_importing_the_package_leaves_triton_alone():
    code = (
        "import sys, nalaformer_hf, nalaformer_hf.ops; assert 'nalaformer_hf.ops.triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
