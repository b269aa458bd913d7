"""NaLaFormer, norm-aware linear attention, as a Hugging Face transformers model package."""

import importlib

from ._torchvision import torchvision_mismatch_explained

__version__ = "0.1.0"

with torchvision_mismatch_explained():
    importlib.import_module("transformers.modeling_utils")
