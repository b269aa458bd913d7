"""What each kernel takes of a device, read off a compilation ahead of time: it needs no GPU.

Registers and stack come from the compiler's own report on its result; a stack means that registers were
spilled to memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .decode import decode_constants, decode_kernel
from .gradients import den_grad_constants, den_grad_kernel, input_grads_kernel
from .outputs import outputs_kernel
from .plan import Plan
from .sums import chunk_sums_kernel, scan_constants, scan_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that one block of threads may have.
SHARED_LIMITS = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}

_FP32 = {
    "cos",
    "sin",
    "inverse",
    "weights",
    "sums",
    "states",
    "initial",
    "final",
    "grad_den",
    "state",
    "new_state",
}
_INT64 = {"chunk_starts", "chunk_sequences", "bounds", "first_chunks"}
_INT32 = {"num_heads", "num_tables", "num_tokens", "INITIAL_STRIDE", "FINAL_STRIDE"}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Launch(NamedTuple):
    """One kernel with the constants that a plan gives it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int


class Resources(NamedTuple):
    """What one compiled kernel takes."""

    registers: int  # per thread
    spilled: int  # bytes of stack per thread; gfx942: vector registers
    shared: int  # bytes per block of threads


def launches(plan: Plan) -> Iterator[Launch]:
    """Every launch of a forward, a backward and a decode step."""
    sums = plan.constants(plan.sums)
    yield Launch("sums of k", chunk_sums_kernel, sums | {"IS_QUERY": False}, plan.sums.num_warps)
    yield Launch("sums of q", chunk_sums_kernel, sums | {"IS_QUERY": True}, plan.sums.num_warps)
    yield Launch("scan", scan_kernel, scan_constants(plan, reverse=False, has_initial=True), 4)
    for name, is_query, kernel, tiles in (
        ("o", True, outputs_kernel, plan.outputs),
        ("dv", False, outputs_kernel, plan.outputs),
        ("dq", True, input_grads_kernel, plan.gradients),
        ("dk", False, input_grads_kernel, plan.gradients),
    ):
        constants = plan.constants(tiles) | {"IS_QUERY": is_query, "CAUSAL": plan.causal}
        yield Launch(name, kernel, constants, tiles.num_warps)
    yield Launch("dden", den_grad_kernel, den_grad_constants(plan), 4)
    yield Launch("decode", decode_kernel, decode_constants(plan.spec, plan.rotary, plan.D, plan.V), 4)


def compile_launch(launch: Launch, dtype: torch.dtype, target: str) -> Resources:
    """Compiles one launch for a target and reads off what it takes."""
    signature, attributes = {}, {}
    for i, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name] = "constexpr"
        elif name in _INT32:
            signature[name] = "i32"
        elif name == "eps":
            signature[name] = "fp32"
        else:
            kind = "fp32" if name in _FP32 else "i64" if name in _INT64 else _DTYPES[dtype]
            signature[name] = "*" + kind
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, launch.constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": 1}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    read = _read_amd if target.startswith("gfx") else _read_nvidia
    return Resources(*read(compiled), compiled.metadata.shared)


def _read_nvidia(compiled: Any) -> tuple[int, int]:
    tool = Path(nvidia.__file__ or "").parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def _read_amd(compiled: Any) -> tuple[int, int]:
    usage = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", compiled.asm["amdgcn"]))
    return int(usage["vgpr_count"]), int(usage["vgpr_spill_count"])
