"""What runs in the interpreting process: norm and gate on fla's kernel in a model, against its torch form."""

from collections.abc import Iterator

import torch
from interpreted_fla import patch_fla
from tiny_models import error, random_ids, tiny_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nalaformer_hf.modeling import attention_nala
from nalaformer_hf.ops.triton.gated_norm import fla_gated_norm


def compare(name: str) -> tuple[dict[str, float], list[float]]:
    """Errors of logits and gradients; bytes kept a channel and token, on the kernel and in torch."""
    patch_fla()
    model, ids = tiny_model(name, fuse_norm=True), random_ids(2, 20)
    hooked, results, kept = [], [], []
    model.model.layers[0].attn.o_norm.register_forward_hook(lambda *_: hooked.append(None))
    for fused in (lambda o, gate, norm: fla_gated_norm, None):
        attention_nala.fused_gated_norm = fused
        output = model(ids, labels=ids)
        grads = torch.autograd.grad(output.loss, list(model.parameters()))
        results.append((output.logits, torch.cat([x.flatten() for x in grads])))
        kept.append(sum(_kept(model.model.layers[0].attn)))
    assert len(hooked) == 2
    return {name: error(x, y) for name, x, y in zip(("logits", "gradients"), *results, strict=True)}, kept


def _kept(layer: attention_nala.NaLaAttention) -> Iterator[float]:
    """What the backward of norm, gate and output projection keeps, in 16 bits, besides parameters."""
    T, config = 4096, layer.config
    layer = type(layer)(config).bfloat16()
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    x = torch.randn(1, T, config.hidden_size).bfloat16()
    o = torch.randn(1, T, layer.num_heads, config.value_head_dim).bfloat16().requires_grad_()
    with saved_tensors_hooks(pack, lambda x: x):
        layer._project_out(o, x)
    for y in kept.values():
        if y.numel() == o.numel() and y.data_ptr() != x.data_ptr():
            yield y.nbytes / o.numel()
