"""Files that are either whole or absent."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8 under another name, then give it its own, which no reader sees half-written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
