"""The kernels' benchmark runs from end to end, on toy shapes in the interpreter."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fused_kernels.py"


@pytest.mark.xdist_group("interpreter")
def test_benchmark_runs_in_the_interpreter(tmp_path):
    pytest.importorskip("matplotlib")
    shapes = ["--tokens", "16", "33", "--dims", "16", "--heads", "1", "--batch-tokens", "33"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *shapes, "--repeats", "1", "--output", str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["implementation"], row["T"], row["B"]) for row in rows] == [
        (name, T, B) for T, B in (("16", "2"), ("33", "1")) for name in ("kernels", "torch", "sdpa")
    ]
    assert all(float(row[name]) > 0 for row in rows for name in ("forward", "backward", "both"))
    assert all(row[name] for row in rows for name in ("device", "torch", "triton", "fla-core"))
    if (SCRIPT.parent.parent / ".git").exists():
        assert all(row["commit"] for row in rows)
    assert (tmp_path / "results.png").stat().st_size > 0
