"""What every test shares: the markers that need a machine's parts, and a fixed seed."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from interpreted import call, interpreter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--network", action="store_true", help="run the tests that need the internet")


def pytest_configure() -> None:
    """A test run that was started in the background inherits an ignored SIGINT, which some tests send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason in words, what this machine cannot run."""
    for item in items:
        if item.get_closest_marker("network") and not config.getoption("--network"):
            item.add_marker(pytest.mark.skip(reason="needs the internet: run with --network"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch finds none on this machine"))
        if item.get_closest_marker("needs_compiler") and not cpp_compiler_works():
            item.add_marker(
                pytest.mark.skip(
                    reason="torch.compile on the CPU needs a C++ compiler, OpenMP and Python's headers "
                    "(Debian: apt-get install g++ python3-dev), or CXX naming one"
                )
            )


@cache
def cpp_compiler_works() -> bool:
    """Whether the compiler that torch.compile takes on a CPU can compile what torch.compile writes."""
    compiler = shlex.split(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    if shutil.which(compiler[0]) is None:
        return False
    command = [*compiler, "-fsyntax-only", f"-I{sysconfig.get_path('include')}", "-x", "c++", "-"]
    source = "#include <Python.h>\n#include <omp.h>\n"
    return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def interpret() -> Iterator[Callable[..., Any]]:
    """Calls a function, by its module and name, in a process with TRITON_INTERPRET=1."""
    with interpreter() as pool:
        yield lambda module, name, *args, **kwargs: pool.submit(call, module, name, *args, **kwargs).result()
