"""`nalaformer doctor`: a table of the kernels' errors on this machine, and an exit status."""

import os
import subprocess
import sys

import pytest

from nalaformer_hf.cli import main


def test_without_a_gpu_it_says_why(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "linear: backend 'torch', since for 'triton' it needs tensors on a GPU, got cpu" in out
    assert "\ndelta: the chunked torch form, since" in out
    assert "\nfuse_norm: norm and gate in torch, since" in out
    assert "\ngated_delta: the chunked torch form, since" in out


# Doubles every output of the decode kernel if BROKEN is set.
CODE = """
import os, sys, torch
from nalaformer_hf.cli import main
from nalaformer_hf.ops.triton import selftest
if "BROKEN" in os.environ:
    step = selftest.fused_step
    def broken(*args, **kwargs):
        o, state = step(*args, **kwargs)
        return 2 * o, state
    selftest.fused_step = broken
with torch.inference_mode():  # as where `generate` is the first to use a kernel
    sys.exit(main(["doctor"]))
"""


@pytest.mark.xdist_group("interpreter")
@pytest.mark.parametrize("broken", [False, True])
def test_kernels_are_tested_in_the_interpreter(broken):
    environment = {**os.environ, "TRITON_INTERPRET": "1", **({"BROKEN": "1"} if broken else {})}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if ", D=16, V=8" in line]
    assert len(rows) == 17
    failed = [line for line in rows if "FAILED" in line]
    assert ["decode" in line for line in failed] == [True] * broken
    assert done.returncode == int(broken), done.stderr
