"""A model whose `linear` layers run on the fused kernels is the model on the torch form."""

import pytest

pytestmark = pytest.mark.xdist_group("interpreter")


@pytest.mark.parametrize("name", ["linear", "linear-rotary-hybrid"])
def test_model_on_the_kernels(interpret, name):
    interpret("fused_models", "check_model", name)
