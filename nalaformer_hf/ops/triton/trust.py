"""Whether "auto" may use the kernels on a GPU: the result of the self-test, kept per device and versions.

The first use on a GPU runs a short self-test; `nalaformer doctor` runs the long one and renews the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from ... import __version__
from ...files import write_whole
from ..dispatch import fla_version
from .delta_selftest import DeltaCase, run_delta_selftest
from .gated_norm import NormCase, run_norm_selftest
from .selftest import QUICK, Case, Check, run_selftest

AnyCase = Case | DeltaCase | NormCase

untraced: Any = torch.compiler.disable  # reading a file is nothing to compile


@untraced
def why_not_trusted(device: torch.device, *cases: AnyCase) -> str | None:
    """Why "auto" leaves a part's kernels out on this GPU, in words; None if they passed their self-test.

    Args:
        device: The GPU.
        cases: The calls of one part to test where no result is kept; none: those of `linear`.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _why_not_trusted(index, cases or QUICK)


@cache
def _why_not_trusted(index: int, cases: tuple[AnyCase, ...]) -> str | None:
    device, part = torch.device("cuda", index), cases[0].part
    failures = _kept(device, part)
    if failures is None:
        _wait(device)
        failures = record(device, part, _run(device, cases))
    if not failures:
        return None
    return f"the kernels' self-test failed on this machine ({failures[0]}); `nalaformer doctor` says more"


def _kept(device: torch.device, part: str) -> list[str] | None:
    """The failures on file; None where there is no file to read, so that the self-test has to run."""
    try:
        return json.loads(record_path(device, part).read_text())["failures"]
    except (OSError, json.JSONDecodeError):
        return None


def _run(device: torch.device, cases: tuple[Any, ...]) -> list[Check]:
    if isinstance(cases[0], Case):
        return run_selftest(device, cases)
    return (run_delta_selftest if isinstance(cases[0], DeltaCase) else run_norm_selftest)(device, cases)


def _wait(device: torch.device) -> None:
    """Until the device is idle: an error of what ran before, raised here, is no failure of a kernel."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first use of the kernels on a GPU tests them, which a CUDA graph cannot record; call once "
            "before recording, or run `nalaformer doctor`"
        )
    torch.cuda.synchronize(device)


def record(device: torch.device, part: str, checks: list[Check]) -> list[str]:
    """Keeps the result of a part's self-test for the next process; returns the failures in words.

    A test that raised is not kept: what was wrong (no compiler, a full disk) may be mended by then.
    """
    failures = [f"{x.case}: {x.name} {x.message}".strip() for x in checks if not x.passed]
    try:
        path = record_path(device, part)
        path.unlink(missing_ok=True)
        if any(check.message for check in checks):
            return failures
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**_facts(device), "failures": failures}, indent=1))
    except OSError as error:
        warnings.warn(f"the kernels' self-test will run again in the next process: {error}", stacklevel=2)
    return failures


def record_path(device: torch.device, part: str) -> Path:
    """The file of this part, this device and these versions.

    Raises:
        OSError: The user has no home directory, nor XDG_CACHE_HOME.
    """
    digest = hashlib.sha256(json.dumps(_facts(device)).encode()).hexdigest()
    return _cache_home() / "nalaformer_hf" / f"selftest-{part}-{digest[:16]}.json"


def _cache_home() -> Path:
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:  # a container's user without a name
        raise OSError("there is no home directory; set HOME or XDG_CACHE_HOME") from error


def _facts(device: torch.device) -> dict[str, str]:
    """What a result holds for."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{properties.name}, {properties.major}.{properties.minor}",
        "runtime": str(torch.version.cuda or torch.version.hip),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fla-core": fla_version() or "none",
        "nalaformer_hf": __version__,
    }
