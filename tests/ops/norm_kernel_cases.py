"""What runs in the interpreting process: norm and gate in flash-linear-attention's kernel."""

import torch
from interpreted_fla import patch_fla
from torch import Tensor

from nalaformer_hf.ops.triton import gated_norm
from nalaformer_hf.ops.triton.gated_norm import fla_gated_norm


def selftest(*cases: tuple, broken: bool = False) -> list[tuple[str, str, float, bool]]:
    """(norm, result, error, passed) of the self-test; `broken`: with a gate that is not differentiated."""
    patch_fla()

    def broken_norm(x: Tensor, gate: Tensor, *args) -> Tensor:
        return fla_gated_norm(x, gate.detach(), *args) + 0 * gate

    gated_norm.fla_gated_norm = broken_norm if broken else fla_gated_norm
    with torch.inference_mode():
        checks = gated_norm.run_norm_selftest(
            torch.device("cpu"), tuple(gated_norm.NormCase(*case) for case in cases)
        )
    return [(check.case.norm, check.name, check.error, check.passed) for check in checks]
