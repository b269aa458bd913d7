"""A block of the NaLa language model, and the softmax attention that its hybrids mix in."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
)

from .attention_nala import NaLaAttention
from .configuration_nala import NaLaConfig
from .linear_nala import NaLaLinear, gated_linear
from .pieces_nala import in_pieces


class NaLaFullAttention(LlamaAttention):
    """Softmax attention of a hybrid's layers: rotary, grouped queries, transformers' attention interface."""


class NaLaRotaryEmbedding(LlamaRotaryEmbedding):
    """The rotary tables of full attention, whose frequencies stay fp32 when the model is cast.

    A cast to bf16 would put the angles of position 2,000 off by whole radians.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NaLaRotaryEmbedding:
        frequencies = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, before in frequencies.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self


class NaLaMLP(nn.Module):
    """SwiGLU: down(act(gate(x)) · up(x))."""

    def __init__(self, config: NaLaConfig):
        super().__init__()
        self.gate_proj = NaLaLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = NaLaLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = NaLaLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.hidden_act = config.hidden_act
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.hidden_act == "silu":
            return gated_linear(self.down_proj, gate, up)
        return self.down_proj(self.act_fn(gate) * up)


class NaLaBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x)); the mixer is a NaLa layer or softmax attention."""

    def __init__(self, config: NaLaConfig, layer_idx: int):
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        attention = NaLaAttention if self.layer_type == "nala_attention" else NaLaFullAttention
        self.attn = attention(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = NaLaMLP(config)

    def forward(self, hidden_states: Tensor, **mixer_inputs) -> Tensor:
        """(B, T, C) to (B, T, C); `mixer_inputs` are those of `self.attn`."""
        normed = in_pieces(self.attn_norm, hidden_states, calls=(self.attn_norm,))
        mixed, _ = self.attn(normed, **mixer_inputs)
        return in_pieces(self._add_mlp, hidden_states, mixed, calls=(self.mlp_norm, self.mlp))

    def _add_mlp(self, hidden_states: Tensor, mixed: Tensor) -> Tensor:
        """Both residual sums, and what of the block treats each token alone."""
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))
