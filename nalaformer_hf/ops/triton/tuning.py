"""Which tiles a kernel runs with: the fastest of its plan's candidates, measured at the first large call.

A kernel whose compiler spilled, so that more blocks run at a time, is compiled again with more registers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from triton.testing import do_bench

from .plan import Tiles

# Tokens times heads below which any tiles do, since starting the kernel takes longer than running it.
SMALL = 1 << 15

_fastest: dict[Hashable, Tiles] = {}
_spilled: set[Hashable] = set()
_place: int | None = None
_place_lock = Lock()


def launch_fastest(
    launch: Callable[[Tiles], Any], candidates: tuple[Tiles, ...], *, key: Hashable, work: int, is_hip: bool
) -> None:
    """Calls `launch` with the fastest candidate, again with more registers when its kernel proves to spill.

    `launch` returns the compiled kernel, None in the interpreter, and gives the same results each time.
    """
    tiles = fastest(launch, candidates, key=key, work=work)
    if (key, tiles) not in _spilled:
        if not getattr(launch(tiles), "n_spills", 0) or is_hip:
            return
        _spilled.add((key, tiles))
    launch(tiles.roomy)


@contextmanager
def candidate(place: int) -> Iterator[None]:
    """Every kernel runs with the candidate at this place, or with its last one; for tests of them all."""
    global _place
    with _place_lock:  # threads of several GPUs may test at once; backwards run in threads of their own
        _place = place
        try:
            yield
        finally:
            _place = None


def fastest(
    launch: Callable[[Tiles], object], candidates: tuple[Tiles, ...], *, key: Hashable, work: int
) -> Tiles:
    """The candidate with which `launch` is fastest, or the first one where nothing is to be measured.

    Nothing is measured for small calls, while a CUDA graph is recorded, without the 256 MB that it takes, and
    where results have to be the same in each run (`torch.use_deterministic_algorithms`), since tiles change
    the order of sums.
    """
    if _place is not None:
        return candidates[min(_place, len(candidates) - 1)]
    if len(candidates) == 1 or torch.are_deterministic_algorithms_enabled():
        return candidates[0]
    if key not in _fastest:
        if work < SMALL or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        try:
            times = {tiles: _milliseconds(launch, tiles) for tiles in candidates}
        except torch.OutOfMemoryError:
            return candidates[0]
        _fastest[key] = min(times, key=times.__getitem__)
    return _fastest[key]


def _milliseconds(launch: Callable[[Tiles], object], tiles: Tiles) -> Any:
    return do_bench(lambda: launch(tiles), warmup=5, rep=20, return_mode="median")
