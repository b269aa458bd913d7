"""The NaLa language model: RMSNorm → mixer → residual → RMSNorm → SwiGLU → residual.

Letters in shapes: B batch, T tokens, C hidden size, R packed sequences.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_nala import NaLaAttention
from .block_nala import NaLaBlock, NaLaFullAttention, NaLaRotaryEmbedding
from .cache_nala import create_nala_mask
from .configuration_nala import NaLaConfig
from .feature_maps_nala import upcast
from .hub_language_nala import LANGUAGE_FAMILY
from .hub_nala import HubModel
from .inputs_nala import (
    check_cache,
    check_keywords,
    check_logits_to_keep,
    check_mask,
    check_positions,
    check_tensor,
    check_tokens,
    check_unpacked,
    default_positions,
    packed_bounds,
    sequence_of_token,
)
from .linear_nala import NaLaLinear
from .loss_nala import chunked_loss
from .pieces_nala import in_pieces
from .short_convolution_nala import ShortConvolution


class NaLaPreTrainedModel(HubModel):
    """What all heads share: how weights are made, what the library may do with the model."""

    config: NaLaConfig
    config_class = NaLaConfig
    hub_family = LANGUAGE_FAMILY
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NaLaBlock"]
    _skip_keys_device_placement = ["cache"]
    _input_embed_layer = "embeddings"
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": NaLaBlock,
        "attentions": [NaLaAttention, NaLaFullAttention],
    }

    def __init__(self, config: NaLaConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        # A delta-rule state cannot be rolled back, so assisted decoding refuses before any work.
        self._is_stateful = config.has_recurrent_delta

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            bound = module.kernel_size[0] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, NaLaAttention) and module.config.mixer == "gated_delta":
            _init_decay(module)


def _init_decay(module: NaLaAttention) -> None:
    """Decay rates A in [1, 16], time steps log-uniform in [0.001, 0.1], as in Mamba-2 and Gated DeltaNet."""
    rates = torch.empty_like(module.A_log, dtype=torch.float32).uniform_(1, 16)
    init.copy_(module.A_log, rates.log())
    steps = torch.empty_like(rates).uniform_(math.log(0.001), math.log(0.1)).exp()
    init.copy_(module.dt_bias, steps + torch.log(-torch.expm1(-steps)))  # inverse of softplus


class NaLaModel(NaLaPreTrainedModel):
    """Embeddings, blocks and final norm: hidden states without a head."""

    _auto_class = "AutoModel"

    def __init__(self, config: NaLaConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([NaLaBlock(config, i) for i in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        has_full_attention = "full_attention" in config.layer_types
        self.rotary_emb = NaLaRotaryEmbedding(config) if has_full_attention else None
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache", raise_if_both_names=True)
    @deprecate_kwarg("cache_params", "6.0.0", new_name="cache", raise_if_both_names=True)
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of each token.

        Law of causality: unless `config.is_causal` is False, the output at a token depends on no later token,
        on no other row, on no padding, and on no other packed sequence.

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T), 1 at real tokens, anywhere in the row; or a mask per layer type.
            position_ids: (B, T); where they restart in a call without mask and cache, sequences are packed.
            cache: What an earlier call returned, or a `DynamicCache(config=model.config)`.
            inputs_embeds: (B, T, C), in place of `input_ids`.
            use_cache: Return a cache that the next call continues; packed sequences and encoders have none.
            **kwargs: Those of `transformers.utils.TransformersKwargs`; `cu_seq_lens_q` bounds the packed
                sequences of one row, `seq_idx` (B, T) numbers those of each row.

        Raises:
            TypeError: For any other keyword, what is no tensor, or a cache that is none.
            ValueError: For inputs of another shape, or that contradict each other.
        """
        check_keywords(kwargs)
        tokens = check_tokens(input_ids, inputs_embeds, self)
        check_mask(attention_mask, self.config.layer_types)
        check_cache(cache)
        x: Tensor = self.embeddings(tokens) if inputs_embeds is None else tokens
        check_positions(position_ids, *x.shape[:2])
        cu_seqlens = packed_bounds(x, attention_mask, position_ids, cache, kwargs)
        use_cache = use_cache and cu_seqlens is None and self.config.is_causal
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        positions = position_ids
        if positions is None:
            positions = default_positions(x, attention_mask, cache, cu_seqlens)
        gives_attentions = self._gives_attentions(kwargs)
        mixer_inputs: dict[str, dict[str, Any]] = {
            "nala_attention": {"cu_seqlens": cu_seqlens, "output_attentions": gives_attentions}
        }
        if self.rotary_emb is not None:
            mixer_inputs["full_attention"] = {
                "position_embeddings": self.rotary_emb(x, positions),
                "is_causal": self.config.is_causal,
                **_flash_keywords(cu_seqlens),
            }
        masks = self._masks(x, attention_mask, positions, cache, cu_seqlens)
        for block in self.layers:
            layer_type = str(block.layer_type)
            x = block(
                x,
                attention_mask=masks[layer_type],
                position_ids=positions,
                cache=cache,
                **mixer_inputs[layer_type],
            )
        x = in_pieces(self.norm, x, calls=(self.norm,))
        return BaseModelOutputWithPast(last_hidden_state=x, cache=cache if use_cache else None)

    def _gives_attentions(self, keywords: dict) -> bool:
        wanted = bool(keywords.get("output_attentions", self.config.output_attentions))
        implementation = self.config._attn_implementation
        if wanted and self.rotary_emb is not None and implementation != "eager":
            raise ValueError(
                "output_attentions: full_attention layers give weights only with "
                f"attn_implementation='eager', got {implementation!r}."
            )
        return wanted

    def _masks(self, x: Tensor, attention_mask, position_ids: Tensor, cache: Cache | None, cu_seqlens):
        """The mask of each kind of layer, by its name."""
        if isinstance(attention_mask, dict):
            return attention_mask
        if attention_mask is not None and attention_mask.ndim == 2 and len(attention_mask) == 1:
            attention_mask = attention_mask.expand(len(x), -1)
        masks = {}
        if "nala_attention" in self.config.layer_types:
            masks["nala_attention"] = create_nala_mask(self.config, x, attention_mask, cache)
        if "full_attention" in self.config.layer_types:
            within: dict[str, Any] = {"position_ids": position_ids}
            if cu_seqlens is not None:
                owners = sequence_of_token(x, cu_seqlens)
                within = {"and_mask_function": packed_sequence_mask_function(owners)}
            masks["full_attention"] = create_causal_mask(
                self.config,
                x,
                attention_mask,
                cache,
                layer_idx=self.config.layer_types.index("full_attention"),
                **within,
            )
        return masks


def _flash_keywords(cu_seqlens: Tensor | None) -> dict[str, Any]:
    """Packed sequences in the words of transformers' attention functions."""
    if cu_seqlens is None:
        return {}
    bounds, longest = cu_seqlens.int(), int(cu_seqlens.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


class NaLaForCausalLM(NaLaPreTrainedModel, GenerationMixin):
    """Language model: `NaLaModel` and a head over the vocabulary, tied to the embeddings if so configured."""

    _auto_class = "AutoModelForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: NaLaConfig):
        super().__init__(config)
        self.model = NaLaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = NaLaLinear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the library's.

        Raises:
            ValueError: Also if the model is not causal, or if `assistant_model` has a state that cannot be
                rolled back, which the library would notice only after a draft.
        """
        if not self.config.is_causal:
            raise ValueError(
                "generate needs a causal model, got is_causal=False: an encoder reads later tokens, "
                "which are still to come."
            )
        assistant = kwargs.get("assistant_model")
        if getattr(assistant, "_is_stateful", False):
            raise ValueError(
                "assistant_model must have a state that can be rolled back, as the 'linear' mixer has, "
                f"got a {type(assistant).__name__} without one."
            )
        return cast("Any", super()).generate(*args, **kwargs)

    def _get_resized_lm_head(self, old_lm_head: nn.Linear, *args, **kwargs) -> nn.Linear:
        """The library's resized head, of the class that a reload makes."""
        resized = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        head = NaLaLinear(resized.in_features, resized.out_features, bias=False, device="meta")
        head.weight = resized.weight
        return head

    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache", raise_if_both_names=True)
    @deprecate_kwarg("cache_params", "6.0.0", new_name="cache", raise_if_both_names=True)
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the loss against `labels`.

        With `config.chunk_loss` and labels there are no logits (None), since they are never held at once.

        Args:
            input_ids: As for `NaLaModel.forward`, like all arguments not listed here.
            attention_mask: (B, past + T).
            position_ids: (B, T).
            cache: What an earlier call returned.
            inputs_embeds: (B, T, C).
            labels: (B, T), the input's own tokens, -100 where none is to be predicted; shifted here.
            use_cache: Return a cache.
            logits_to_keep: Compute logits of the last n tokens only (0: all), or at the given indices.
            **kwargs: As for `NaLaModel.forward`.

        Raises:
            TypeError: If `logits_to_keep` is neither a number nor a tensor.
            ValueError: If there are labels but the model is not causal: it would see what it is to predict;
                for a negative `logits_to_keep`, or one beside `config.chunk_loss`, which leaves no logits.
        """
        check_logits_to_keep(logits_to_keep)
        if labels is not None and not kwargs.get("is_causal", self.config.is_causal):
            raise ValueError("labels: the loss of the next token needs a causal model, got is_causal=False.")
        chunked = self.config.chunk_loss
        if labels is not None and chunked and (isinstance(logits_to_keep, Tensor) or logits_to_keep != 0):
            raise ValueError(
                f"logits_to_keep: chunk_loss leaves no logits beside labels, got {logits_to_keep}."
            )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states, vocab_size = outputs.last_hidden_state, self.config.vocab_size
        logits, loss = None, None
        if labels is not None and chunked:
            head, loss_function = self.lm_head, self.loss_function
            loss = chunked_loss(head, loss_function, hidden_states, labels, vocab_size=vocab_size, **kwargs)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class NaLaForSequenceClassification(NaLaPreTrainedModel):
    """One label a row, from its last real token or the mean of them (`config.classifier_pooling`)."""

    _auto_class = "AutoModelForSequenceClassification"
    accepts_loss_kwargs = False  # its losses are means over rows, so the Trainer must scale them itself

    def __init__(self, config: NaLaConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NaLaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache", raise_if_both_names=True)
    @deprecate_kwarg("cache_params", "6.0.0", new_name="cache", raise_if_both_names=True)
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Logits of the labels (B, num_labels), and the loss against `labels`.

        Args:
            input_ids: As for `NaLaModel.forward`, like all arguments not listed here.
            attention_mask: (B, past + T), 1 at real tokens; None: those that are not `config.pad_token_id`,
                or all of one row that continues a cache.
            position_ids: (B, T).
            cache: What an earlier call returned.
            inputs_embeds: (B, T, C).
            labels: (B,) classes or numbers, or (B, num_labels).
            use_cache: Return a cache.
            **kwargs: As for `NaLaModel.forward`.

        Raises:
            TypeError: If `attention_mask` is no tensor.
            ValueError: If nothing tells which tokens of a batch's rows are real, or the rows are packed.
        """
        tokens = check_tokens(input_ids, inputs_embeds, self)
        if attention_mask is not None:
            check_tensor("attention_mask", attention_mask)
        check_unpacked(tokens, attention_mask, position_ids, cache, kwargs)
        if attention_mask is None:
            attention_mask = self._real_tokens(tokens, cache)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        pooled = self._pool(outputs.last_hidden_state, attention_mask)
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _real_tokens(self, tokens: Tensor, cache: Cache | None) -> Tensor | None:
        """(B, T), True at real tokens; None for one row that has no padding."""
        pad = self.config.pad_token_id
        if tokens.ndim == 2 and pad is not None and cache is None:  # ids
            return tokens != pad
        if len(tokens) > 1:
            raise ValueError(
                f"attention_mask: {len(tokens)} rows need one, or config.pad_token_id and input_ids without "
                "a cache, to find their real tokens, got None."
            )
        return None

    def _pool(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, C) to (B, C)."""
        if mask is None:
            mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
        real = mask[:, -hidden_states.shape[1] :].bool().expand(len(hidden_states), -1)
        if self.config.classifier_pooling == "mean":
            total = upcast(hidden_states.masked_fill(~real.unsqueeze(-1), 0)).sum(1)
            return (total / real.sum(1, keepdim=True).clamp_min(1)).to(hidden_states.dtype)
        last = (torch.arange(real.shape[1], device=real.device) * real).argmax(1)
        return hidden_states[torch.arange(len(last), device=last.device), last]


class NaLaForTokenClassification(GenericForTokenClassification, NaLaPreTrainedModel):
    """One label a token (the library's generic head)."""

    _auto_class = "AutoModelForTokenClassification"
    accepts_loss_kwargs = False

    def __init__(self, config: NaLaConfig):
        # Not the generic head's own: it makes the model through AutoModel, which refuses remote code.
        NaLaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = NaLaModel(config)
        self.dropout = nn.Dropout(0.1)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class NaLaForQuestionAnswering(GenericForQuestionAnswering, NaLaPreTrainedModel):
    """Start and end of an answer (the library's generic head)."""

    _auto_class = "AutoModelForQuestionAnswering"
    accepts_loss_kwargs = False

    def __init__(self, config: NaLaConfig):
        NaLaPreTrainedModel.__init__(self, config)  # as for token classification
        self.model = NaLaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings, which the generic head expects under another name."""
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Puts other embeddings in place."""
        self.model.embeddings = value


__all__ = [
    "NaLaForCausalLM",
    "NaLaForQuestionAnswering",
    "NaLaForSequenceClassification",
    "NaLaForTokenClassification",
    "NaLaModel",
    "NaLaPreTrainedModel",
]
