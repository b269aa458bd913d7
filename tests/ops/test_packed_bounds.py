"""The bounds of packed sequences are read from a GPU once, not in every layer."""

import torch

from nalaformer_hf.modeling.chunking_nala import bounds_on_host


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and counts how often it is read."""

    device = torch.device("cuda", 0)
    reads = 0

    def tolist(self) -> list[int]:
        type(self).reads += 1
        return super().tolist()


def test_shared_bounds_are_read_once():
    bounds = torch.tensor([0, 3, 8]).as_subclass(OnGpu)
    assert [bounds_on_host(bounds) for _ in range(3)] == [[0, 3, 8]] * 3
    assert OnGpu.reads == 1
    bounds[1] = 4
    assert [bounds_on_host(bounds) for _ in range(2)] == [[0, 4, 8]] * 2
    assert bounds_on_host(bounds.clone()) == [0, 4, 8]
    assert OnGpu.reads == 3
    with torch.inference_mode():  # where changes leave no trace
        bounds = torch.tensor([0, 2]).as_subclass(OnGpu)
        assert bounds_on_host(bounds) == [0, 2]
        bounds[1] = 5
        assert bounds_on_host(bounds) == [0, 5]


def test_bounds_on_a_cpu_are_read_each_time():
    """Their memory may be shared with arrays whose changes torch does not see."""
    array = torch.tensor([0, 3]).numpy()
    bounds = torch.from_numpy(array)
    assert bounds_on_host(bounds) == [0, 3]
    array[1] = 4
    assert bounds_on_host(bounds) == [0, 4]
