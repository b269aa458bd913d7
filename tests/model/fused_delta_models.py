"""What runs in the interpreting process: a model on fla's kernels against its torch form."""

import torch
from interpreted_fla import patch_fla
from tiny_models import error, random_ids, tiny_model
from torch import Tensor

from nalaformer_hf.modeling import attention_nala
from nalaformer_hf.ops.dispatch import FusedForms
from nalaformer_hf.ops.triton.delta import fla_delta_rule, fla_step_delta_rule


def delta_model_errors(name: str) -> dict[str, float]:
    """Errors of the logits, of the gradients and of the logits after a cache."""
    patch_fla()
    model, ids = tiny_model(name), random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    calls = {"rule": 0, "step": 0}

    def rule(q, k, v, *args, **kwargs) -> tuple[Tensor, Tensor]:
        calls["rule"] += 1
        return fla_delta_rule(q, k, v.half(), *args, **kwargs)

    def step(*args) -> tuple[Tensor, Tensor]:
        calls["step"] += 1
        return fla_step_delta_rule(*args)

    results = []
    for forms in (FusedForms(rule, step), None):
        attention_nala.fused_delta_forms = lambda k, v, gated, forms=forms: forms
        output = model(ids, attention_mask=mask, labels=ids)
        grads = torch.autograd.grad(output.loss, list(model.parameters()))
        with torch.no_grad():
            cache = model(ids[:, :-2], attention_mask=mask[:, :-2], use_cache=True).cache
            for end in (19, 20):
                last = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], cache=cache).logits
        results.append((output.logits[mask == 1], torch.cat([x.flatten() for x in grads]), last))
    assert calls["rule"] > 0
    assert calls["step"] == 2 * model.config.layer_types.count("nala_attention")
    return {name: error(x, y) for name, x, y in zip(("logits", "gradients", "last"), *results, strict=True)}
