"""NaLa attention in fused kernels: launches and the autograd function.

Forward: sums over chunks, a scan over the chunks, outputs chunk by chunk; or all in one kernel, sequence by
sequence, where there are enough of them. Backward: the states again, the states of the gradients in reverse,
gradients chunk by chunk. Only q, k, v, o, the initial state and one number a token and head are kept between
the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...modeling.feature_maps_nala import FeatureSpec
from .gradients import den_grad_constants, den_grad_kernel, input_grads_kernel
from .outputs import outputs_kernel
from .plan import Plan, Tiles, device_facts, make_plan
from .sequences import Sequences, cut_sequences
from .sequential import is_sequential, sequential_constants, sequential_kernel
from .sums import SCAN_BLOCK, chunk_sums_kernel, scan_constants, scan_kernel
from .tuning import launch_fastest


class _Launcher:
    """The kernels of one call, with the arguments that they share."""

    def __init__(self, q: Tensor, cos: Tensor | None, sin: Tensor | None, sequences: Sequences, plan: Plan):
        self.num_tokens, self.num_heads = q.shape[0] * q.shape[1], q.shape[2]
        self.device = q.device
        self.sequences, self.plan = sequences, plan
        self.cos, self.sin = (q, q) if cos is None or sin is None else (cos, sin)  # q: never read
        self.num_tables = self.cos.numel() // plan.D
        self.where = (sequences.chunk_starts, sequences.chunk_sequences, sequences.bounds, self.num_heads)

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised fp32."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def states(
        self,
        x: Tensor,
        values: Tensor,
        initial: Tensor | None,
        final: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """States outside each chunk; of queries and in reverse if `scales` (1 / den, dden) are given.

        Bidirectional: the sums over each sequence.
        """
        plan, count = self.plan, self.sequences.num_chunks
        num_features = 2 * plan.D
        sums = self.empty(count, self.num_heads, num_features, plan.stride)
        inverse, weights = scales or (x, x)

        def launch(tiles: Tiles) -> Any:
            return chunk_sums_kernel[count, self.num_heads, triton.cdiv(plan.V, tiles.BV)](
                x, values, inverse, weights, self.cos, self.sin, sums, *self.where, self.num_tables,
                IS_QUERY=scales is not None, **plan.constants(tiles), **plan.options(tiles),
            )  # fmt: skip

        self._run(launch, plan.sums, "sums of k" if scales is None else "sums of q")
        num_states = self.sequences.num_sequences
        if final is None:
            final = self.empty(num_states, self.num_heads, num_features, plan.stride)
        size = num_features * (plan.V + 1)
        scan_kernel[num_states * self.num_heads, triton.cdiv(size, SCAN_BLOCK)](
            sums, sums if initial is None else initial, final, self.sequences.first_chunks, self.num_heads,
            plan.V + 1, final.shape[-1], **scan_constants(plan, scales is not None, initial is not None),
        )  # fmt: skip
        return sums if plan.causal else final

    def outputs(self, x: Tensor, y: Tensor, values: Tensor, inverse: Tensor, states: Tensor, is_query: bool):
        """o, filling `inverse`, or the gradient of v."""
        plan, out = self.plan, torch.empty_like(values)

        def launch(tiles: Tiles) -> Any:
            return outputs_kernel[self._num_blocks(tiles.BT), self.num_heads, triton.cdiv(plan.V, tiles.BV)](
                x, y, values, inverse, out, self.cos, self.sin, states, *self.where, self.num_tables,
                plan.eps, IS_QUERY=is_query, CAUSAL=plan.causal,
                **plan.constants(tiles), **plan.options(tiles),
            )  # fmt: skip

        self._run(launch, plan.outputs, "o" if is_query else "dv")
        return out

    def sequential_outputs(
        self, q: Tensor, k: Tensor, v: Tensor, inverse: Tensor, initial: Tensor | None, final: Tensor
    ) -> Tensor:
        """o, filling `inverse` and `final`, in one kernel."""
        plan, out = self.plan, torch.empty_like(v)

        def launch(tiles: Tiles) -> Any:
            num_programs = self.sequences.num_sequences * self.num_heads
            return sequential_kernel[num_programs, triton.cdiv(plan.V, tiles.BV)](
                q, k, v, inverse, out, self.cos, self.sin, final if initial is None else initial, final,
                self.sequences.bounds, self.num_heads, self.num_tables,
                **sequential_constants(plan, tiles, initial is not None), **plan.options(tiles),
            )  # fmt: skip

        self._run(launch, plan.sequential, "sequential o")
        return out

    def den_grad(self, grad_o: Tensor, o: Tensor, inverse: Tensor) -> Tensor:
        """Gradient of the denominators (tokens, H)."""
        result, constants = torch.empty_like(inverse), den_grad_constants(self.plan)
        den_grad_kernel[triton.cdiv(self.num_tokens, constants["BT"]), self.num_heads](
            grad_o, o, inverse, result, self.num_tokens, self.num_heads, **constants
        )
        return result

    def input_grads(self, x: Tensor, y: Tensor, values, scales, states: Tensor, is_query: bool) -> Tensor:
        """The gradient of x; `values`: of the tokens of x and of y; `scales`: 1 / den, dden."""
        plan, grad = self.plan, torch.empty_like(x)

        def launch(tiles: Tiles) -> Any:
            return input_grads_kernel[self._num_blocks(tiles.BT), self.num_heads](
                x, y, *values, *scales, grad, self.cos, self.sin, states, *self.where, self.num_tables,
                IS_QUERY=is_query, CAUSAL=plan.causal, **plan.constants(tiles), **plan.options(tiles),
            )  # fmt: skip

        self._run(launch, plan.gradients, "dq" if is_query else "dk")
        return grad

    def _run(self, launch: Callable[[Tiles], Any], candidates: tuple[Tiles, ...], name: str) -> None:
        work, key = self.num_tokens * self.num_heads, (name, self.device, self.plan)
        launch_fastest(launch, candidates, key=key, work=work, is_hip=self.plan.device.is_hip)

    def _num_blocks(self, BT: int) -> int:
        return self.sequences.num_chunks * (self.plan.chunk_size // BT)


class _Attention(torch.autograd.Function):
    """q, k (B, T, H, D), v (B, T, H, V), all contiguous; initial [S | z] (R, H, 2D, V + 1) or None."""

    @staticmethod
    def forward(ctx, q, k, v, initial, cos, sin, sequences: Sequences, plan: Plan):
        launcher = _Launcher(q, cos, sin, sequences, plan)
        inverse = launcher.empty(launcher.num_tokens, launcher.num_heads)
        final = None
        if plan.causal:
            final = launcher.empty(sequences.num_sequences, q.shape[2], 2 * plan.D, plan.V + 1)
        if is_sequential(plan, sequences, launcher.num_tokens, launcher.num_heads):
            o = launcher.sequential_outputs(q, k, v, inverse, initial, final)
        else:
            states = launcher.states(k, v, initial, final)
            o = launcher.outputs(q, k, v, inverse, states, is_query=True)
        ctx.save_for_backward(q, k, v, initial, cos, sin, o, inverse)
        ctx.sequences, ctx.plan = sequences, plan
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):
        q, k, v, initial, cos, sin, o, inverse = ctx.saved_tensors
        launcher = _Launcher(q, cos, sin, ctx.sequences, ctx.plan)
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o.contiguous()
        grad_final = None if grad_final is None else grad_final.contiguous()
        scales = inverse, launcher.den_grad(grad_o, o, inverse)
        states = launcher.states(k, v, initial)
        grad_q = launcher.input_grads(q, k, (grad_o, v), scales, states, is_query=True)
        del states
        grad_initial = None if initial is None else torch.empty_like(initial)
        states = launcher.states(q, grad_o, grad_final, grad_initial, scales)
        grad_k = launcher.input_grads(k, q, (v, grad_o), scales, states, is_query=False)
        grad_v = launcher.outputs(k, q, grad_o, inverse, states, is_query=False)
        return grad_q, grad_k, grad_v, grad_initial, None, None, None, None


@torch.compiler.disable
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: FeatureSpec,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_layout: str = "phase",
    causal: bool = True,
    eps: float = 0.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`modeling.linear_attention_nala.chunked_attention` in fused kernels; arguments are trusted.

    Args:
        q: (B, T, H, D), fp32, fp16 or bf16, D ≤ 256.
        k: As q.
        v: (B, T, H, V), V ≤ 256.
        spec: Feature maps, "cosine" or "polarity".
        rotary: Tables (T, D) or (B, T, D) for the numerator.
        rotary_layout: "phase" or "axial".
        causal: Whether token t sees s ≤ t only.
        eps: Added to φ_q·mean(φ_k), bidirectional only.
        initial_state: [S | z] in fp32, (B, H, 2D, V + 1), or one a sequence, (R, H, 2D, V + 1), with
            `cu_seqlens`, in the basis turned by π/4.
        cu_seqlens: (R + 1,) bounds of the sequences of one packed row, B = 1.

    Returns:
        o (B, T, H, V) in the dtype of v and the final state in fp32; no state if not `causal`.
    """
    plan = make_plan(
        spec,
        q.shape[-1],
        v.shape[-1],
        torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype)),
        device_facts(q.device),
        rotary="none" if rotary is None else rotary_layout,
        causal=causal,
        eps=eps,
    )
    sequences = cut_sequences(q.shape[0], q.shape[1], plan.chunk_size, cu_seqlens, q.device)
    cos, sin = (None, None) if rotary is None else (x.float().contiguous() for x in rotary)
    initial = None if initial_state is None else initial_state.contiguous()
    q, k, v = (x.contiguous() for x in (q, k, v))
    with torch.cuda.device_of(q):
        return _Attention.apply(q, k, v, initial, cos, sin, sequences, plan)
