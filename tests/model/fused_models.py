"""What runs in the interpreting process: a model on the kernels against the same model on the torch form."""

import torch
from tiny_models import random_ids, tiny_model

from nalaformer_hf.modeling import attention_nala
from nalaformer_hf.ops.dispatch import FusedForms
from nalaformer_hf.ops.triton.attention import fused_attention
from nalaformer_hf.ops.triton.decode import fused_step

TOLERANCE = 2e-4  # two fp32 forms of a whole model with large weights


def check_model(name: str) -> None:
    """Logits, every parameter's gradient and generated tokens."""
    model, ids = tiny_model(name), random_ids(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    calls = {"attention": 0, "in place": 0, "step": 0}

    def attention(*args, **kwargs):
        calls["attention"] += 1
        return fused_attention(*args, **kwargs)

    def step(*args, in_place, **kwargs):
        calls["in place" if in_place else "step"] += 1
        return fused_step(*args, in_place=in_place, **kwargs)

    results = []
    for forms in (None, FusedForms(attention, step)):
        attention_nala.fused_forms = lambda q, v, spec, forms=forms: forms
        output = model(ids, attention_mask=mask, labels=ids)
        gradients = torch.autograd.grad(output.loss, list(model.parameters()))
        # With an assistant model or prompt lookup, the cache keeps the states that a step would overwrite.
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        looked_up = model.generate(
            ids[1:], max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=2, use_cache=True
        )
        results.append((output.logits[mask == 1], gradients, tokens, looked_up))
    (logits, gradients, *tokens), (fused_logits, fused_gradients, *fused_tokens) = results
    assert calls["attention"] > 0
    assert calls["in place"] > 0
    assert (fused_logits - logits).abs().max() <= TOLERANCE * logits.abs().max()
    largest = max(float(x.abs().max()) for x in gradients)
    for x, y in zip(fused_gradients, gradients, strict=True):
        assert (x - y).abs().max() <= TOLERANCE * largest
    for x, y in zip(fused_tokens, tokens, strict=True):
        assert torch.equal(x, y)
