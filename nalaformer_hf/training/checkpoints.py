"""Folders that are complete or not there at all."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPLETE_MARK = "complete"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Fill a sibling of `target`, flush it to disk, mark it complete and rename it to `target`.

    Args:
        target: The folder to make; one that is there is replaced.

    Yields:
        The sibling to write to. If the body raises, `target` stays as it was.
    """
    staging = staging_folder(target)
    yield staging
    publish(staging, target)


def staging_path(target: Path) -> Path:
    """Return the path of the sibling that is renamed to `target`."""
    return target.with_name(f".{target.name}.partial")


def staging_folder(target: Path) -> Path:
    """Make that sibling, without what an earlier attempt left there."""
    staging = staging_path(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish(staging: Path, target: Path) -> None:
    """Flush `staging` to disk, mark it complete and rename it to `target`, which it replaces."""
    (staging / COMPLETE_MARK).touch()
    for path in [*staging.rglob("*"), staging]:
        _flush(path)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    _flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Tell whether `publish` made the folder."""
    return (folder / COMPLETE_MARK).is_file()


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete `checkpoint-N` folders, in the order of N."""
    steps = {
        int(found[1]): folder
        for folder in output_dir.glob("checkpoint-*")
        if (found := re.fullmatch(r"checkpoint-(\d+)", folder.name)) and is_complete(folder)
    }
    return [steps[step] for step in sorted(steps)]


def last_complete_checkpoint(output_dir: Path) -> Path | None:
    """Return the complete `checkpoint-N` of the highest N, if there is one."""
    checkpoints = complete_checkpoints(output_dir)
    return checkpoints[-1] if checkpoints else None


def drop_old_checkpoints(output_dir: Path, limit: int, kept: set[Path]) -> None:
    """Remove complete checkpoints, the oldest first, until `limit` of them are left.

    Args:
        output_dir: Where they are.
        limit: How many may stay.
        kept: Checkpoints that stay in any case.
    """
    checkpoints = complete_checkpoints(output_dir)
    for folder in [folder for folder in checkpoints if folder not in kept][
        : max(len(checkpoints) - limit, 0)
    ]:
        (folder / COMPLETE_MARK).unlink()
        shutil.rmtree(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
