"""torch.compile of the public function: one graph, the same numbers, forward and backward."""

import pytest
import torch
from op_cases import make_case
from tolerances import TOLERANCES, assert_close_rows

from nalaformer_hf.ops import nala_attention

# "aot_eager" captures both graphs and runs them as they are; "inductor" compiles them.
COMPILERS = [
    "aot_eager",
    pytest.param("inductor", marks=[pytest.mark.needs_compiler, pytest.mark.slow]),
]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    ("form", "causal", "rotary"), [("cosine", True, "phase"), ("polarity", False, "axial")]
)
def test_compiled_is_eager(form, causal, rotary, compiler):
    case = make_case(form, 70, causal=causal, rotary=rotary, dtype=torch.float32)
    attend = torch.compile(nala_attention, fullgraph=True, backend=compiler)
    for wanted, came, tolerance in zip(
        case.run("torch"), case.run("torch", attend), TOLERANCES[form, torch.float32], strict=True
    ):
        for name in wanted:
            assert_close_rows(came[name], wanted[name], tolerance, name)
