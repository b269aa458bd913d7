"""Norm-aware linear attention as a part: one function, exact and differentiable, in several forms."""

from .attention import nala_attention
from .dispatch import resolve_backend
from .reference import nala_feature_maps

__all__ = ["nala_attention", "nala_feature_maps", "resolve_backend"]
