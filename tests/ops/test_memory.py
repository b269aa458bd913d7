"""What the chunked form keeps for its backward."""

import pytest
import torch
from op_cases import qkv

from nalaformer_hf.ops import nala_attention


def bytes_saved(B: int, T: int, H: int, D: int, V: int, dtype=torch.float32, **options) -> int:
    """Bytes of all tensors that autograd keeps between forward and backward, each storage counted once."""
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    q, k, v = qkv(B, T, H, D, V, dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        nala_attention(q, k, v, **options)
    return sum(storages.values())


@pytest.mark.parametrize("form", ["cosine", "relu"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 4096, 8, 64, 64), (16, 1024, 8, 64, 64), (2, 4000, 4, 128, 64)], ids=str
)
def test_only_q_k_v_and_o_are_kept(form, causal, shape):
    """And a few numbers a row: the features, twice as wide and once each for q and k, are not."""
    B, T, H, D, V = shape
    rows = B * T * H
    allowed = 4 * rows * (2 * D + 2 * V)
    saved = bytes_saved(*shape, form=form, causal=causal)
    assert allowed < saved < 1.13 * allowed
