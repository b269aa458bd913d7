"""What the checkpoints of the language models say of themselves."""

from __future__ import annotations

from typing import Any

from .hub_nala import Head, HubFamily


def _summary(model: Any) -> dict[str, Any]:
    """The model in a few lines."""
    config = model.config
    num_full = config.layer_types.count("full_attention")
    layers = f"{config.num_hidden_layers}, " + (
        f"of which {num_full} softmax attention" if num_full else "all NaLa attention"
    )
    return {
        "parameters": f"{model.num_parameters():,} in {str(model.dtype).removeprefix('torch.')}",
        "layers": layers,
        "width": f"{config.hidden_size}, feed-forward {config.intermediate_size}",
        "vocabulary": config.vocab_size,
        "heads": f"{config.num_attention_heads}, {config.head_dim} wide (values {config.value_head_dim})",
        "mixer": f"{config.mixer}, {'causal' if config.is_causal else 'bidirectional'}",
        "features": config.feature_form,
        "short convolution": config.conv_size if config.use_short_conv else "none",
    }


def _limits(config: Any) -> list[str]:
    """What a reader should not expect."""
    limits = [
        "Nothing is claimed but what stands under Training: no other quality, bias or safety was measured.",
        "Not supported: tensor and pipeline parallelism, vLLM, SGLang, GGUF.",
    ]
    if config.is_causal:
        limits.append(
            "NaLa layers keep a state of constant size: long contexts cost no more memory a token, but are "
            "remembered only as far as that state holds them."
        )
    if config.has_recurrent_delta:
        limits.append(
            "Not supported: assisted and prompt-lookup decoding; a delta-rule state cannot be rolled back."
        )
    return limits


LANGUAGE_FAMILY = HubFamily(
    config="configuration_nala.NaLaConfig",
    modeling_module="modeling_nala",
    heads={
        "AutoModel": Head("NaLaModel", "feature-extraction"),
        "AutoModelForCausalLM": Head("NaLaForCausalLM", "text-generation"),
        "AutoModelForSequenceClassification": Head("NaLaForSequenceClassification", "text-classification"),
        "AutoModelForTokenClassification": Head("NaLaForTokenClassification", "token-classification"),
        "AutoModelForQuestionAnswering": Head("NaLaForQuestionAnswering", "question-answering"),
    },
    tags=("nala", "nalaformer", "linear-attention"),
    summary=_summary,
    limits=_limits,
)
