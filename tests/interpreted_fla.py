"""flash-linear-attention's own kernels in Triton's interpreter, on the CPU.

Two patches make it possible: one configuration a kernel, since tuning needs a driver, and loop indices with
the `to` that they have when compiled. Interpreted bf16 products are garbage: give the kernels fp16.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache

import pytest

needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention: pip install fla-core"
)


class _Index(int):
    def to(self, dtype: object) -> "_Index":
        return self


class _Range:
    def __init__(self, *bounds):
        self.numbers = range(*(int(bound) for bound in bounds))

    def __iter__(self) -> Iterator[_Index]:
        return map(_Index, self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@cache
def patch_fla() -> None:
    """Import fla so that the interpreter runs it."""
    from triton.runtime.autotuner import Autotuner

    build = Autotuner.__init__

    def build_untuned(self, fn, arg_names, configs, *args, **kwargs):
        build(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = build_untuned
    for name in ("ops.delta_rule", "ops.gated_delta_rule", "modules.fused_norm_gate"):
        importlib.import_module(f"fla.{name}")
    Autotuner.__init__ = build
    for name, module in sys.modules.items():
        if name.startswith(("fla.ops.", "fla.modules.")):
            module.range = _Range
