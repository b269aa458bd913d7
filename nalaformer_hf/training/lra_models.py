"""Encoders of a Long Range Arena run: NaLa and two baselines, for one sequence or for two documents."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from nalaformer_hf import NaLaConfig, NaLaForSequenceClassification
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_config import LRADataSection, LRAModelSection
from nalaformer_hf.training.lra_data import PADDING
from nalaformer_hf.training.models import check_fields, count_parameters, match_size

# What an encoder of bytes is; a run cannot set these.
ENCODER: dict[str, Any] = {
    "mixer": "linear",
    "is_causal": False,
    "classifier_pooling": "mean",
    "pad_token_id": PADDING,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Every token sees every other one, and only rotary tells how far it is; the softmax layers have it too.
DEFAULTS: dict[str, Any] = {"use_rotary": True}
# What is the choice of `model.attention`, or follows from the task.
_CHOSEN = ("feature_form", "layer_types", "vocab_size", "max_position_embeddings")


def make_lra_model(section: LRAModelSection, data: LRADataSection) -> NaLaForSequenceClassification:
    """Make the encoder with new weights.

    Args:
        section: The model section.
        data: The data section, whose task decides the tokens, the classes and the head.

    Raises:
        ConfigError: A field is unknown, fixed, or does not fit the others.
    """
    check_fields(NaLaConfig, section.overrides)
    if fixed := [name for name in (*ENCODER, *_CHOSEN) if name in section.overrides]:
        raise ConfigError(f"model.overrides cannot set {', '.join(fixed)}: it follows from the task")
    try:
        config = make_lra_config(section, data)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {error}") from error
    network = DocumentPairClassifier if data.task == "retrieval" else NaLaForSequenceClassification
    return network(config)


def make_lra_config(section: LRAModelSection, data: LRADataSection) -> NaLaConfig:
    """Return the configuration of the encoder; that of softmax has NaLa's number of parameters."""
    fields = DEFAULTS | section.overrides | ENCODER
    fields |= {
        "vocab_size": data.facts.num_tokens + 1,
        "num_labels": data.facts.num_labels,
        "max_position_embeddings": data.length,
    }
    nala = NaLaConfig(**fields)
    if section.attention == "elu":
        return NaLaConfig(**fields, feature_form="elu")
    if section.attention == "softmax":
        softmax = NaLaConfig(**fields, layer_types=["full_attention"] * nala.num_hidden_layers)
        return match_size(softmax, count_parameters(nala))
    return nala


class DocumentPairClassifier(NaLaForSequenceClassification):
    """Whether two documents belong together: an MLP on [u, v, u ⊙ v, u − v] of their pooled encodings.

    The concatenation is that of Long Range Arena (Tay et al. 2020); the encoder is the same for both.

    Args:
        config: As for `NaLaForSequenceClassification`.
    """

    _auto_class = None  # this class is no part of what a checkpoint carries

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.score = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, self.num_labels))
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and the mean cross entropy against `labels`.

        Args:
            input_ids: (B, 2, T).
            attention_mask: (B, 2, T), 1 at real tokens.
            labels: (B,).
        """
        mask = attention_mask.flatten(0, 1)
        encoded = self.model(input_ids=input_ids.flatten(0, 1), attention_mask=mask).last_hidden_state
        u, v = self._pool(encoded, mask).unflatten(0, (-1, 2)).unbind(1)
        logits = self.score(torch.cat((u, v, u * v, u - v), dim=-1))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
