"""NaLaFormer, norm-aware linear attention, as a Hugging Face transformers model package.

Importing it registers the models with transformers' Auto classes; it needs no GPU, triton or torchvision.
"""

from ._torchvision import torchvision_mismatch_explained

__version__ = "0.1.0"

with torchvision_mismatch_explained():
    from .modeling import (
        NaLaAttention,
        NaLaBackbone,
        NaLaConfig,
        NaLaForCausalLM,
        NaLaForImageClassification,
        NaLaForQuestionAnswering,
        NaLaForSequenceClassification,
        NaLaForTokenClassification,
        NaLaModel,
        NaLaVisionConfig,
        NaLaVisionModel,
    )

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
