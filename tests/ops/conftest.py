"""What the op's tests share: a process that interprets kernels, started once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interpreted import call, interpreter


@pytest.fixture(scope="session")
def interpret() -> Iterator[Callable[..., Any]]:
    """Calls a function of `kernel_cases`, by its name, in a process with TRITON_INTERPRET=1."""
    with interpreter() as pool:
        yield lambda name, *args, **kwargs: pool.submit(call, name, *args, **kwargs).result()
