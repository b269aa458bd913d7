"""The models, and their registration with transformers' Auto classes."""

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .attention_nala import NaLaAttention
from .configuration_nala import NaLaConfig
from .configuration_nala_vision import NaLaVisionConfig
from .modeling_nala import (
    NaLaForCausalLM,
    NaLaForQuestionAnswering,
    NaLaForSequenceClassification,
    NaLaForTokenClassification,
    NaLaModel,
)
from .modeling_nala_vision import NaLaBackbone, NaLaForImageClassification, NaLaVisionModel

AutoConfig.register(NaLaConfig.model_type, NaLaConfig, exist_ok=True)
AutoModel.register(NaLaConfig, NaLaModel, exist_ok=True)
AutoModelForCausalLM.register(NaLaConfig, NaLaForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(NaLaConfig, NaLaForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(NaLaConfig, NaLaForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(NaLaConfig, NaLaForQuestionAnswering, exist_ok=True)

AutoConfig.register(NaLaVisionConfig.model_type, NaLaVisionConfig, exist_ok=True)
AutoModel.register(NaLaVisionConfig, NaLaVisionModel, exist_ok=True)
AutoBackbone.register(NaLaVisionConfig, NaLaBackbone, exist_ok=True)
AutoModelForImageClassification.register(NaLaVisionConfig, NaLaForImageClassification, exist_ok=True)

__all__ = [
    "NaLaAttention",
    "NaLaBackbone",
    "NaLaConfig",
    "NaLaForCausalLM",
    "NaLaForImageClassification",
    "NaLaForQuestionAnswering",
    "NaLaForSequenceClassification",
    "NaLaForTokenClassification",
    "NaLaModel",
    "NaLaVisionConfig",
    "NaLaVisionModel",
]
