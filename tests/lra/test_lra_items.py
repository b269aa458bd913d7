"""Generated items: ListOps against an evaluator of another kind, Pathfinder against its geometry."""

import itertools
import random
import re
from functools import partial

import numpy as np
import pytest

from nalaformer_hf.training import pathfinder
from nalaformer_hf.training.listops import MAX_ARGUMENTS, MAX_DEPTH, OPERATORS, TOKENS, draw_listops
from nalaformer_hf.training.lra_items import distinct_items
from nalaformer_hf.training.pathfinder import SIZE, draw_pathfinder

OPERATION = re.compile(r"\[(\w+)((?: \d)+) \]")


def rewrite(text: str) -> int:
    """The value of an expression, whose innermost operations become their values until a digit is left."""
    while not text.isdigit():
        text, count = OPERATION.subn(lambda found: str(reduce(found[1], found[2].split())), text)
        assert count
    return int(text)


def reduce(operator: str, digits: list[str]) -> int:
    values = sorted(map(int, digits))
    assert 2 <= len(values) <= MAX_ARGUMENTS
    middle = len(values) // 2
    return {
        "MIN": values[0],
        "MAX": values[-1],
        "MED": values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2,
        "SM": int(str(sum(values))[-1]),
    }[operator]


def test_evaluator_by_hand():
    """The first is the example of Long Range Arena's paper."""
    assert rewrite("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]") == 5
    assert rewrite("[SM 9 9 [MED 1 4 ] ]") == 0


@pytest.mark.parametrize(
    ("max_length", "count", "max_depth"), [(64, 400, MAX_DEPTH), (64, 400, 3), (2000, 40, MAX_DEPTH)]
)
def test_listops_labels_are_the_values(max_length, count, max_depth):
    rng = random.Random(0)
    seen, depths, labels = set(), set(), set()
    for _ in range(count):
        item = draw_listops(rng, max_length, max_depth)
        text = " ".join(TOKENS[token] for token in item.sequence)
        assert rewrite(text) == item.label
        assert max_length / 4 < len(item.sequence) < max_length
        seen.update(text.split())
        steps = ((token in OPERATORS) - (token == "]") for token in text.split())
        depths.add(max(itertools.accumulate(steps)))
        labels.add(item.label)
    assert seen == set(TOKENS)
    assert labels == set(range(10))
    assert max(depths) == max_depth - 1  # operations; digits may be one deeper


@pytest.fixture(scope="module")
def drawings():
    """Paths, dots, and item of some drawings."""
    geometry, render = [], pathfinder._render

    def noted(paths, dots):
        geometry.append((paths, dots))
        return render(paths, dots)

    rng = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathfinder, "_render", noted)
        items = [draw_pathfinder(rng) for _ in range(400)]
    return [(*drawn, item) for drawn, item in zip(geometry, items, strict=True)]


def test_pathfinder_labels_follow_from_the_paths(drawings):
    for paths, dots, item in drawings:
        owners = [[i for i, path in enumerate(paths) if dot in (path[0], path[-1])] for dot in dots]
        assert owners == ([[0], [0]] if item.label else [[0], [1]])
        assert dots[0] != dots[1]
        assert len(paths) == 6
        assert len(paths[0]) == len(paths[1]) > max(map(len, paths[2:]))


def test_pathfinder_paths_do_not_cross(drawings):
    for paths, _, _ in drawings:
        steps = [step for path in paths for step in itertools.pairwise(path)]
        assert not any(cross(a, b) for a, b in itertools.combinations(steps, 2) if a[1] != b[0])


def cross(first, second) -> bool:
    """Whether two line segments meet: the ends of each lie on different sides of the other."""

    def side(a, b, c):
        return ((b - a).conjugate() * (c - a)).imag

    (a, b), (c, d) = first, second
    return side(a, b, c) * side(a, b, d) <= 0 and side(c, d, a) * side(c, d, b) <= 0


def test_pathfinder_images_show_the_dots_and_the_dashes(drawings):
    for paths, dots, item in drawings[:100]:
        image = np.frombuffer(item.sequence, dtype=np.uint8).reshape(SIZE, SIZE)
        near = [brightness(image, dot) for dot in dots]
        far = [brightness(image, end) for path in paths for end in (path[0], path[-1]) if end not in dots]
        assert min(near) > max(far)
        for path in paths:
            for corner, following in itertools.pairwise(path):
                middle = (corner + following) / 2
                assert brightness(image, middle) > 30
        assert 0.1 < (image > 0).mean() < 0.5


def brightness(image: np.ndarray, place: complex) -> float:
    """Mean of the 3 × 3 pixels around a place."""
    row, column = int(place.imag), int(place.real)
    return float(image[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2].mean())


def test_pathfinder_distances_tell_little(drawings):
    """No threshold on the distance of the dots classifies much better than guessing."""
    distances = np.array([abs(dots[0] - dots[1]) for _, dots, _ in drawings])
    labels = np.array([item.label for *_, item in drawings])
    assert 0.4 < labels.mean() < 0.6
    right = [((distances > threshold) == labels).mean() for threshold in distances]
    assert max(*right, *(1 - share for share in right)) < 0.6


@pytest.mark.parametrize("draw", [partial(draw_listops, max_length=64), draw_pathfinder])
def test_items_follow_the_seed_and_are_distinct(draw):
    first = list(distinct_items(draw, 1, 60))
    assert list(distinct_items(draw, 1, 30)) == first[:30]
    assert len({item.sequence for item in first}) == 60
    assert first[0] not in list(distinct_items(draw, 2, 60))


def test_items_drawn_twice_are_skipped():
    items = list(distinct_items(partial(draw_listops, max_length=8), 0, 3000))
    assert len({item.sequence for item in items}) == 3000
    rng = random.Random(0)
    assert len({draw_listops(rng, 8).sequence for _ in range(3000)}) < 3000
