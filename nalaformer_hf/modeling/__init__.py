"""The models, and their registration with transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .attention_nala import NaLaAttention
from .configuration_nala import NaLaConfig
from .modeling_nala import (
    NaLaForCausalLM,
    NaLaForQuestionAnswering,
    NaLaForSequenceClassification,
    NaLaForTokenClassification,
    NaLaModel,
)

AutoConfig.register(NaLaConfig.model_type, NaLaConfig, exist_ok=True)
AutoModel.register(NaLaConfig, NaLaModel, exist_ok=True)
AutoModelForCausalLM.register(NaLaConfig, NaLaForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(NaLaConfig, NaLaForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(NaLaConfig, NaLaForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(NaLaConfig, NaLaForQuestionAnswering, exist_ok=True)

__all__ = [
    "NaLaAttention",
    "NaLaConfig",
    "NaLaForCausalLM",
    "NaLaForQuestionAnswering",
    "NaLaForSequenceClassification",
    "NaLaForTokenClassification",
    "NaLaModel",
]
