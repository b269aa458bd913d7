"""NaLaFormer, norm-aware linear attention, as a Hugging Face transformers model package.

Importing it registers the models with transformers' Auto classes; it needs no GPU, triton or torchvision.
"""

from ._torchvision import torchvision_mismatch_explained

__version__ = "0.1.0"

with torchvision_mismatch_explained():
    from .modeling import (
        NaLaAttention,
        NaLaConfig,
        NaLaForCausalLM,
        NaLaForQuestionAnswering,
        NaLaForSequenceClassification,
        NaLaForTokenClassification,
        NaLaModel,
    )

__all__ = [
    "NaLaAttention",
    "NaLaConfig",
    "NaLaForCausalLM",
    "NaLaForQuestionAnswering",
    "NaLaForSequenceClassification",
    "NaLaForTokenClassification",
    "NaLaModel",
]
