"""The five tasks of Long Range Arena as published: lengths, sizes of the splits, sources of the items."""

from dataclasses import dataclass
from typing import Literal

from nalaformer_hf.training import listops

TaskName = Literal["listops", "text", "retrieval", "image", "pathfinder"]
BYTES = 256


@dataclass(frozen=True)
class LRATask:
    """A task (Tay et al. 2020, arXiv 2011.04006).

    Args:
        title: Its name in the paper.
        num_tokens: Number of different tokens, without padding.
        num_labels: Number of classes.
        max_length: Longest sequence; of two documents each.
        sizes: Items of the splits train, validation and test.
        source: Name on the Hub; None: made by rule or, retrieval, given by the user.
        is_generated: Whether our own code draws the items.
        is_image: Whether a sequence is the pixels of a square image.
    """

    title: str
    num_tokens: int
    num_labels: int
    max_length: int
    sizes: tuple[int, int, int]
    source: str | None = None
    is_generated: bool = False
    is_image: bool = False


LRA_TASKS: dict[TaskName, LRATask] = {
    "listops": LRATask("ListOps", len(listops.TOKENS), 10, 2000, (96_000, 2_000, 2_000), is_generated=True),
    "text": LRATask("Text", BYTES, 2, 4096, (25_000, 0, 25_000), "stanfordnlp/imdb"),
    "retrieval": LRATask("Retrieval", BYTES, 2, 4000, (147_086, 18_090, 17_437)),
    "image": LRATask("Image", BYTES, 10, 1024, (45_000, 5_000, 10_000), "uoft-cs/cifar10", is_image=True),
    "pathfinder": LRATask(
        "Pathfinder", BYTES, 2, 1024, (160_000, 20_000, 20_000), is_generated=True, is_image=True
    ),
}
