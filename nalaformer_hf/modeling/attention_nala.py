"""The NaLa layer: projections, short convolution, mixer, output norm, gate, output projection.

Letters in shapes: B batch, T tokens, H heads, D head dim of q and k, V head dim of v, F feature width,
C channels, R packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .cache_nala import NaLaCacheLayer, Replay
from .configuration_nala import NaLaConfig
from .delta_rule_nala import chunked_delta_rule, step_delta_rule
from .feature_maps_nala import apply_rotary, map_features, unit_features, upcast
from .inputs_nala import check_bounds, check_cache, check_hidden, check_positions, check_tensor
from .linear_attention_nala import Rotary, chunked_attention, step_attention, widen_tables
from .linear_nala import NaLaLinear, gated_linear
from .output_norm_nala import OutputLayerNorm, OutputRMSNorm
from .pieces_nala import in_pieces
from .short_convolution_nala import LeftPadding, ShortConvolution, extend_window

try:  # inside the package only: a pushed copy that imported it would mix the code of both
    if not __name__.startswith("nalaformer_hf."):
        raise ImportError("a pushed copy")
    from nalaformer_hf.ops.dispatch import fused_delta_forms, fused_forms, fused_gated_norm
except ImportError:
    fused_forms = fused_delta_forms = fused_gated_norm = None


class _Tokens(NamedTuple):
    """What mixer and cache need of a call's tokens, padding leftmost; `inputs`: the convolutions' ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Any  # None in `linear`
    log_decay: Tensor | None
    rotary: Rotary | None
    inputs: tuple[Tensor, Tensor, Tensor]
    padding: LeftPadding | None

    def first(self, length: int) -> _Tokens:
        """The first `length` tokens in the caller's order, without the delta rule's gates."""
        slots, padding = None, None
        if self.padding is not None:
            slots, padding = self.padding.first(length)

        def cut(x: Tensor) -> Tensor:
            if slots is None:
                return x[:, :length]
            return x.take_along_dim(slots.view(*slots.shape, *(1,) * (x.ndim - 2)), dim=1)

        q, k, v = (cut(x) for x in self.inputs)
        inputs, rotary = (q, k, v), _map_tables(cut, self.rotary)
        return _Tokens(cut(self.q), cut(self.k), cut(self.v), None, None, rotary, inputs, padding)


def _map_tables(change: Callable[[Tensor], Tensor], rotary: Rotary | None) -> Rotary | None:
    return None if rotary is None else (change(rotary[0]), change(rotary[1]))


class NaLaAttention(nn.Module):
    """One NaLa layer: projections, short convolution, mixer, output norm, gate, output projection.

    The mixer (`config.mixer`) is the paper's attention made causal ("linear"; bidirectional if not
    `config.is_causal`) or NaLa's unit features inside the delta rule ("delta", "gated_delta"). From the
    convolutions' output to the output norm everything is fp32, with autocast off.

    Args:
        config: A `NaLaConfig`.
        layer_idx: This layer's place in a cache.
    """

    def __init__(self, config: NaLaConfig, layer_idx: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.spec = config.feature_spec
        self.num_heads = config.num_attention_heads
        self.key_dim = config.num_attention_heads * config.head_dim
        self.value_dim = config.num_attention_heads * config.value_head_dim
        self.q_proj = NaLaLinear(config.hidden_size, self.key_dim, bias=False)
        self.k_proj = NaLaLinear(config.hidden_size, self.key_dim, bias=False)
        self.v_proj = NaLaLinear(config.hidden_size, self.value_dim, bias=False)
        self.g_proj = (
            NaLaLinear(config.hidden_size, self.value_dim, bias=False) if config.use_output_gate else None
        )
        self.o_proj = NaLaLinear(self.value_dim, config.hidden_size, bias=False)
        if config.use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, config.conv_size)
            self.k_conv1d = ShortConvolution(self.key_dim, config.conv_size)
            self.v_conv1d = ShortConvolution(self.value_dim, config.conv_size)
        if config.mixer != "linear":
            self.b_proj = NaLaLinear(config.hidden_size, self.num_heads, bias=False)
        if config.mixer == "gated_delta":
            self.a_proj = NaLaLinear(config.hidden_size, self.num_heads, bias=False)
            self.A_log = nn.Parameter(torch.zeros(self.num_heads))
            self.dt_bias = nn.Parameter(torch.zeros(self.num_heads))
        self.o_norm = _output_norm(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes the tokens of each row, or of each packed sequence.

        Args:
            hidden_states: (B, T, C).
            attention_mask: (B, T), 1 at real tokens; None: all are real.
            position_ids: (B, T) or (1, T), for rotary layers, needed beside a mask; None: counted from
                the cache's length.
            cache: A `DynamicCache(config=config)` or `StaticCache`; layer `layer_idx` is read and updated.
            cu_seqlens: (R + 1,) bounds of packed sequences in the B·T tokens, row after row.
            output_attentions: Also return the weights, (B, H, T, T); `linear` without past tokens only.

        Returns:
            (B, T, C) and the weights or None.

        Raises:
            TypeError: If an argument is no tensor, or the cache is none.
            ValueError: If an argument has another shape, or contradicts another one or the config.
        """
        self._check_inputs(hidden_states, attention_mask, position_ids, cache, cu_seqlens)
        if self.config.use_rotary and attention_mask is not None and position_ids is None:
            raise ValueError("position_ids: a rotary layer needs them beside attention_mask, got None.")
        batch, length = hidden_states.shape[:2]
        layer = self._cache_layer(cache, batch)
        rotary = self._rotary(position_ids, hidden_states, layer)
        padding = LeftPadding.of(attention_mask)
        if cu_seqlens is not None:
            hidden_states = hidden_states.reshape(1, batch * length, -1)
            rotary = _map_tables(lambda x: x.expand(batch, -1, -1).reshape(1, batch * length, -1), rotary)
        elif padding is not None:
            hidden_states = padding.sort(hidden_states)
            rotary = _map_tables(lambda x: padding.sort(x.expand(batch, -1, -1)), rotary)
        state, window = (None, None) if layer is None else (layer.state, layer.window)
        tokens = self._project(hidden_states, rotary, padding, window, cu_seqlens)
        weights = self._weights(tokens, state, cu_seqlens) if output_attentions else None
        in_place = layer is not None and state is not None and layer.may_overwrite(state)
        o, new_state = self._mix(tokens, state, cu_seqlens, in_place)
        if layer is not None and new_state is not None:
            replay = self._replay_of(tokens) if self.config.mixer == "linear" else None
            layer.update(new_state, self._window_after(tokens, window), length, replay)
        calls = self.o_norm, self.g_proj, self.o_proj
        out = in_pieces(self._project_out, o, hidden_states, calls=calls)
        if padding is not None:
            out = padding.restore(out)
        return out.view(batch, length, -1), weights

    def _check_inputs(
        self,
        x: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        check_hidden("hidden_states", x, self.config.hidden_size)
        check_positions(position_ids, *x.shape[:2])
        check_cache(cache)
        if mask is not None:
            check_tensor("attention_mask", mask)
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(
                f"attention_mask must be (batch, tokens), {tuple(x.shape[:2])}, got {tuple(mask.shape)}."
            )
        if cu_seqlens is not None and (mask is not None or cache is not None):
            raise ValueError("cu_seqlens: packed sequences take neither attention_mask nor cache, got one.")
        if cu_seqlens is not None:
            check_bounds("cu_seqlens", cu_seqlens, x.shape[0] * x.shape[1])
        if not self.config.is_causal and self.config.mixer != "linear":
            raise ValueError(f"is_causal=False needs the 'linear' mixer, got mixer={self.config.mixer!r}.")
        if not self.config.is_causal and cache is not None:
            raise ValueError("cache: is_causal=False leaves no state to continue, pass cache=None.")

    def _cache_layer(self, cache: Cache | None, batch: int) -> NaLaCacheLayer | None:
        if cache is None:
            return None
        layer: Any = None
        if self.layer_idx is not None and self.layer_idx < len(cache.layers):
            layer = cache.layers[self.layer_idx]
        if getattr(layer, "_layer_type", None) != "nala_attention":
            raise ValueError(
                f"cache: layer {self.layer_idx} must be a NaLa layer, got {type(layer).__name__}; build the "
                "cache with DynamicCache(config=model.config)."
            )
        if layer.state is not None and layer.state.shape[0] != batch:
            raise ValueError(
                f"cache: holds {layer.state.shape[0]} rows, got a batch of {batch}; "
                "`batch_repeat_interleave` and `batch_select_indices` change its rows."
            )
        if layer.state is not None:
            self._check_past(layer.state, layer.window)
        return layer

    def _check_past(self, state: Tensor, window: Tensor | None) -> None:
        """Checks that a cache's past has the shapes that a layer like this one leaves."""
        config = self.config
        columns = config.value_head_dim + (config.mixer == "linear")  # z is one more
        wanted = (self.num_heads, self.spec.width(config.head_dim), columns)
        has_window = config.use_short_conv and config.conv_size > 1
        wanted_window = (config.conv_size - 1, 2 * self.key_dim + self.value_dim) if has_window else None
        found, found_window = tuple(state.shape[1:]), None if window is None else tuple(window.shape[1:])
        if found != wanted or found_window != wanted_window:
            raise ValueError(
                f"cache: a state of {wanted} and a window of {wanted_window} were wanted, got {found} and "
                f"{found_window}; it was filled by a model of another config."
            )

    def _rotary(self, position_ids: Tensor | None, x: Tensor, layer: NaLaCacheLayer | None) -> Rotary | None:
        """Tables (B or 1, T, F / 2) in fp32, or None."""
        if not self.config.use_rotary:
            return None
        if position_ids is None:
            past = 0 if layer is None else layer.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
        num_angles = self.spec.width(self.config.head_dim) // 2
        steps = torch.arange(num_angles, device=x.device, dtype=torch.float32) / num_angles
        angles = position_ids.unsqueeze(-1).float() * self.config.rope_parameters["rope_theta"] ** -steps
        return angles.cos(), angles.sin()

    def _project(
        self,
        x: Tensor,
        rotary: Rotary | None,
        padding: LeftPadding | None,
        window: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> _Tokens:
        """Projections and convolutions."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if padding is not None and self.config.use_short_conv:
            q, k, v = (y.masked_fill(~padding.real.unsqueeze(-1), 0) for y in (q, k, v))
        inputs = (q, k, v)
        if self.config.use_short_conv:
            convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            q, k, v = (
                conv(y, past, padding, cu_seqlens)
                for conv, y, past in zip(convs, inputs, self._split(window), strict=True)
            )
            if self.config.mixer != "linear":
                v = F.silu(v)
        if padding is not None:
            k = k.masked_fill(~padding.real.unsqueeze(-1), self.spec.null_key)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
        return _Tokens(q, k, v, *self._gates(x, padding), rotary, inputs, padding)

    def _split(self, window: Tensor | None):
        """The window's channels of q, k and v."""
        if window is None:
            return None, None, None
        return window.split((self.key_dim, self.key_dim, self.value_dim), dim=-1)

    def _window_after(self, tokens: _Tokens, window: Tensor | None) -> Tensor | None:
        """The convolutions' last conv_size - 1 inputs, (B, conv_size - 1, all channels)."""
        past = self.config.conv_size - 1
        if not self.config.use_short_conv or past == 0:
            return None
        real = tokens.padding and tokens.padding.real[:, -past:]
        ends = (
            extend_window(x[:, -past:], past, before, real)[:, -past:]
            for x, before in zip(tokens.inputs, self._split(window), strict=True)
        )
        return torch.cat(tuple(ends), dim=-1)

    def _replay_of(self, tokens: _Tokens) -> Replay:
        """What rolls back into a call; a plain function, which a copy of the cache shares."""

        def replay(length: int, state: Tensor | None, window: Tensor | None):
            first = tokens.first(length)
            return self._mix(first, state, None)[1], self._window_after(first, window)

        return replay

    def _mix(
        self, tokens: _Tokens, state: Tensor | None, cu_seqlens: Tensor | None, in_place: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The mixer's output (B, T, H, V), rounded by fused forms only, and the state after it in fp32.

        `in_place`: whether the new state may overwrite the old one.
        """
        with maybe_autocast(tokens.q.device.type, enabled=False):
            if self.config.mixer == "linear":
                return self._mix_linear(tokens, state, cu_seqlens, in_place)
            return self._mix_delta(tokens, state, cu_seqlens)

    def _mix_linear(
        self, tokens: _Tokens, state: Tensor | None, cu_seqlens: Tensor | None, in_place: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, rotary = tokens.q, tokens.k, tokens.v, tokens.rotary
        fused = None
        if fused_forms is not None and not torch.compiler.is_compiling():  # a kernel would break the graph
            fused = fused_forms(q, v, self.spec)
        if q.shape[1] == 1 and state is not None:
            if fused is None:
                return step_attention(q, k, v, state, self.spec, rotary=rotary)
            if not torch.is_grad_enabled():
                return fused.step(q, k, v, state, self.spec, rotary=rotary, in_place=in_place)
        attend = chunked_attention if fused is None else fused.attention
        return attend(
            q,
            k,
            v,
            self.spec,
            rotary=rotary,
            causal=self.config.is_causal,
            initial_state=state,
            cu_seqlens=cu_seqlens,
        )

    def _mix_delta(self, tokens: _Tokens, state: Tensor | None, cu_seqlens: Tensor | None):
        q, k = unit_features(tokens.q, self.spec, True), unit_features(tokens.k, self.spec, False)
        v, beta, log_decay = tokens.v, tokens.beta, tokens.log_decay
        fused = None
        if fused_delta_forms is not None and not torch.compiler.is_compiling():
            fused = fused_delta_forms(k, v, gated=log_decay is not None)
        if q.shape[1] == 1 and state is not None:
            step = step_delta_rule if fused is None or torch.is_grad_enabled() else fused.step
            return step(q, k, v, beta, log_decay, state)
        rule = chunked_delta_rule if fused is None else fused.attention
        return rule(q, k, v, beta, log_decay, initial_state=state, cu_seqlens=cu_seqlens)

    def _gates(self, x: Tensor, padding: LeftPadding | None) -> tuple[Tensor | None, Tensor | None]:
        """β (B, T, H) of the delta rule, and its log decay, 0 at padding."""
        if self.config.mixer == "linear":
            return None, None
        beta = upcast(self.b_proj(x)).sigmoid()
        if self.config.mixer == "delta":
            return beta, None
        log_decay = -upcast(self.A_log).exp() * F.softplus(upcast(self.a_proj(x)) + upcast(self.dt_bias))
        if padding is not None:
            log_decay = log_decay.masked_fill(~padding.real.unsqueeze(-1), 0)
        return beta, log_decay

    def _project_out(self, o: Tensor, x: Tensor) -> Tensor:
        """Norm of the mixer's output (B, T, H, V) in fp32, gate, output projection: (B, T, C)."""
        if self.config.output_norm != "head_rms_norm":
            o = o.flatten(2)
        norm: Any = self.o_norm
        gate: Any = None if self.g_proj is None else self.g_proj(x)
        fused = None
        if fused_gated_norm is not None and self.config.fuse_norm and not torch.compiler.is_compiling():
            fused = fused_gated_norm(o, gate, self.config.output_norm)
        if fused is not None:
            return self.o_proj(norm(o, gate.view_as(o), fused).flatten(2))
        o = upcast(o) if norm is None else norm(upcast(o))
        o = o.flatten(2).to(x.dtype)
        return self.o_proj(o) if gate is None else gated_linear(self.o_proj, gate, o)

    def _weights(self, tokens: _Tokens, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Explicit weights of the `linear` mixer, (B, H, T, T) in fp32."""
        if self.config.mixer != "linear":
            raise ValueError(f"output_attentions: the {self.config.mixer!r} mixer has no attention weights.")
        if cu_seqlens is not None:
            raise ValueError(
                "output_attentions: explicit weights of packed sequences are not offered, unpack them."
            )
        if state is not None:
            raise ValueError("output_attentions needs the keys of all tokens, so the cache must be empty.")
        with maybe_autocast(tokens.q.device.type, enabled=False):
            fq, fk = map_features(tokens.q, self.spec, True), map_features(tokens.k, self.spec, False)
            denominators = torch.einsum("bthf,bshf->bhts", fq, fk)
            numerators = denominators
            if tokens.rotary is not None:
                cos, sin = (x.unsqueeze(2) for x in widen_tables(tokens.rotary, fq.dtype))
                turned = apply_rotary(fq, cos, sin), apply_rotary(fk, cos, sin)
                numerators = torch.einsum("bthf,bshf->bhts", *turned)
        if self.config.is_causal:
            denominators, numerators = denominators.tril(), numerators.tril()
        total = denominators.sum(-1, keepdim=True)
        weights = numerators / total.masked_fill(total == 0, 1)
        if tokens.padding is not None:
            place = tokens.padding.order.argsort(dim=1)
            weights = weights.gather(2, place[:, None, :, None].expand_as(weights))
            weights = weights.gather(3, place[:, None, None, :].expand_as(weights))
        return weights


def _output_norm(config: NaLaConfig) -> nn.Module | None:
    """The norm of the mixer's output: over all heads, per head, or none."""
    if config.output_norm == "layer_norm":
        return OutputLayerNorm(config.num_attention_heads * config.value_head_dim)
    if config.output_norm == "head_rms_norm":
        return OutputRMSNorm(config.value_head_dim, eps=config.rms_norm_eps)
    return None
