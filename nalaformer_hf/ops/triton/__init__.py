"""NaLa attention in fused Triton kernels."""
