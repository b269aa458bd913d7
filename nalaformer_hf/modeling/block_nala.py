"""A block of the NaLa language model, and the softmax attention that its hybrids mix in."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRotaryEmbedding,
)

from .attention_nala import NaLaAttention
from .configuration_nala import NaLaConfig


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


class NaLaBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x)); the mixer is a NaLa layer or softmax attention."""

    def __init__(self, config: NaLaConfig, layer_idx: int):
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        attention = NaLaAttention if self.layer_type == "nala_attention" else NaLaFullAttention
        self.attn = attention(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden_states: Tensor, **mixer_inputs) -> Tensor:
        """(B, T, C) to (B, T, C); `mixer_inputs` are those of `self.attn`."""
        mixed, _ = self.attn(self.attn_norm(hidden_states), **mixer_inputs)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))
