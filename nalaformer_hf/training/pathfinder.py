"""Pathfinder: are the two dots the ends of one dashed path? By rule, after Linsley et al. 2018.

A place in the image is a complex number, in pixels.
"""

import cmath
import itertools
import math
import random
from collections.abc import Sequence

from PIL import Image, ImageDraw

from nalaformer_hf.training.lra_items import Item

SIZE = 32
NUM_DASHES = 8  # of each of the two paths that may have dots
NUM_DISTRACTORS = 4
DISTRACTOR_DASHES = 3
STEP = 3.0  # from the beginning of a dash to that of the next
DASH = (0.2, 0.85)  # where it begins and ends, as parts of the step
MAX_TURN = 0.6  # radians between two steps
CLEARANCE = 3.0  # between corners; at one step or more no two paths can cross
MARGIN = 2.0
DISTANCE_MARGIN = 1.0  # between the two pairs of ends that the label chooses from
DOT_RADIUS = 1.2
MAX_TRIALS = 200
FINENESS = 4  # the image is drawn so many times larger

Path = list[complex]
Pair = tuple[complex, complex]


def draw_pathfinder(rng: random.Random) -> Item:
    """Draw an image of dashed paths, two of them long, and two dots.

    With the label 1 the dots are the two ends of the first long path, with 0 an end of each. The label
    decides nothing else: the paths are drawn before it, and until such a pair of ends is as far apart,
    within a pixel, as the ends of the first path. No two paths cross or touch.

    Args:
        rng: Where the random numbers come from.

    Returns:
        The 32 × 32 grey pixels, row by row, and the label.
    """
    while True:
        paths = _paths(rng)
        same, different = _pairs_of_ends(*paths[:2])
        if abs(abs(same[0] - same[1]) - abs(different[0] - different[1])) < DISTANCE_MARGIN:
            break
    label = rng.randrange(2)
    return Item(_render(paths, same if label else different), label)


def _pairs_of_ends(first: Path, second: Path) -> tuple[Pair, Pair]:
    """The ends of the first path, and an end of each, about as far apart."""
    same = first[0], first[-1]
    pairs = itertools.product(same, (second[0], second[-1]))
    return same, min(pairs, key=lambda pair: abs(abs(pair[0] - pair[1]) - abs(same[0] - same[1])))


def _paths(rng: random.Random) -> list[Path]:
    """The two long paths, then the distractors; begun anew where they do not fit."""
    while True:
        paths: list[Path] = []
        for num_dashes in [NUM_DASHES] * 2 + [DISTRACTOR_DASHES] * NUM_DISTRACTORS:
            path = _free_path(rng, num_dashes, [place for path in paths for place in path])
            if path is None:
                break
            paths.append(path)
        else:
            return paths


def _free_path(rng: random.Random, num_dashes: int, taken: Path) -> Path | None:
    for _ in range(MAX_TRIALS):
        path = _walk(rng, num_dashes, taken)
        if len(path) == num_dashes + 1:
            return path
    return None


def _walk(rng: random.Random, num_dashes: int, taken: Path) -> Path:
    """A path's corners, up to where it would leave the image or come too near to another corner."""
    path: Path = []
    place = complex(rng.uniform(MARGIN, SIZE - MARGIN), rng.uniform(MARGIN, SIZE - MARGIN))
    heading = rng.uniform(0, math.tau)
    while len(path) <= num_dashes and _is_free(place, itertools.chain(taken, path[:-1])):
        path.append(place)
        heading += rng.uniform(-MAX_TURN, MAX_TURN)
        place += cmath.rect(STEP, heading)
    return path


def _is_free(place: complex, taken: itertools.chain[complex]) -> bool:
    is_inside = MARGIN <= place.real <= SIZE - MARGIN and MARGIN <= place.imag <= SIZE - MARGIN
    return is_inside and all(abs(place - other) >= CLEARANCE for other in taken)


def _render(paths: Sequence[Path], dots: Pair) -> bytes:
    image = Image.new("L", (SIZE * FINENESS, SIZE * FINENESS))
    canvas = ImageDraw.Draw(image)
    for path in paths:
        for corner, following in itertools.pairwise(path):
            ends = (corner + part * (following - corner) for part in DASH)
            canvas.line([_scaled(end) for end in ends], fill=255, width=FINENESS)
    for dot in dots:
        canvas.circle(_scaled(dot), DOT_RADIUS * FINENESS, fill=255)
    return image.resize((SIZE, SIZE), Image.Resampling.BOX).tobytes()


def _scaled(place: complex) -> tuple[float, float]:
    return place.real * FINENESS, place.imag * FINENESS
