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
from .plan import MAX_REGISTERS, Device, Plan
from .sequential import sequential_constants, sequential_kernel
from .sums import chunk_sums_kernel, scan_constants, scan_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DEVICES = {
    "sm_80": Device(is_hip=False, shared=163 << 10, processors=108),
    "sm_86": Device(is_hip=False, shared=99 << 10, processors=84),
    "sm_90": Device(is_hip=False, shared=227 << 10, processors=132),
    "sm_100": Device(is_hip=False, shared=227 << 10, processors=148),
    "gfx942": Device(is_hip=True, shared=64 << 10, processors=304),
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
    """One kernel with the constants and options that a plan gives it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, int]
    may_be_roomy: bool = True  # whether `tuning` launches it


class Resources(NamedTuple):
    """What one compiled kernel takes."""

    registers: int  # per thread
    spilled: int  # bytes of stack per thread; gfx942: vector registers
    shared: int  # bytes per block of threads


def launches(plan: Plan) -> Iterator[Launch]:
    """Every launch of a forward, a backward and a decode step, with every tiles that it may take."""
    causal = {"CAUSAL": plan.causal}
    for name, kernel, candidates, constants in (
        ("sums of k", chunk_sums_kernel, plan.sums, {"IS_QUERY": False}),
        ("sums of q", chunk_sums_kernel, plan.sums, {"IS_QUERY": True}),
        ("o", outputs_kernel, plan.outputs, {"IS_QUERY": True} | causal),
        ("dv", outputs_kernel, plan.outputs, {"IS_QUERY": False} | causal),
        ("dq", input_grads_kernel, plan.gradients, {"IS_QUERY": True} | causal),
        ("dk", input_grads_kernel, plan.gradients, {"IS_QUERY": False} | causal),
    ):
        for tiles in candidates:
            yield Launch(name, kernel, plan.constants(tiles) | constants, plan.options(tiles))
    for tiles in plan.sequential:
        constants = sequential_constants(plan, tiles, has_initial=True)
        yield Launch("sequential o", sequential_kernel, constants, plan.options(tiles))
    default = {"num_warps": 4, "num_stages": 1}
    scan = scan_constants(plan, reverse=False, has_initial=True)
    yield Launch("scan", scan_kernel, scan, default, may_be_roomy=False)
    yield Launch("dden", den_grad_kernel, den_grad_constants(plan), default, may_be_roomy=False)
    decode = decode_constants(plan.spec, plan.rotary, plan.D, plan.V)
    yield Launch("decode", decode_kernel, decode, default, may_be_roomy=False)


def compile_launch(launch: Launch, dtype: torch.dtype, target: str) -> Resources:
    """Compiles one launch for a target and reads off what it takes; as in `tuning`, again where it spills."""
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
    is_hip = target.startswith("gfx")

    def compiled(**options: int) -> Resources:
        result = triton.compile(source, target=TARGETS[target], options=launch.options | options)
        return Resources(*(_read_amd if is_hip else _read_nvidia)(result), result.metadata.shared)

    used = compiled()
    return compiled(maxnreg=MAX_REGISTERS) if used.spilled and launch.may_be_roomy and not is_hip else used


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
