"""A process in which Triton interprets its kernels on the CPU: the setting holds for a whole process."""

import importlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """One process with TRITON_INTERPRET=1, where uninitialised memory holds NaN."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_set_up)
        pool.submit(_set_up).result()  # the process starts here, and inherits the variable
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    with pool:
        yield pool


def _set_up() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    assert torch.empty(3).isnan().all()


def call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of a module that only this process may import, since it imports the kernels."""
    return getattr(importlib.import_module(module), name)(*args, **kwargs)
