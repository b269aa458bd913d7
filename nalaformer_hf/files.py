"""Files that are either whole or absent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives the path of another file, which takes the place of `path` when the body has written it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8 that no reader sees half-written."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
