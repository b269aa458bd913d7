"""What a model computes on fixed inputs; programs with and without the package share it."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel, pipeline

IDS = torch.tensor([[5, 9, 3, 3, 17, 60, 8], [0, 0, 41, 2, 7, 11, 23]])
MASK = torch.tensor([[1, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])  # padding inside, padding on the left


@torch.no_grad()
def probe(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every output tensor, and what the model generates greedily and with beams."""
    torch.set_num_threads(1)  # bit for bit needs one order of summation
    model.eval()
    if model.main_input_name == "pixel_values":
        images = torch.randn(2, 3, 37, 64, generator=torch.Generator().manual_seed(0))
        outputs = model(images)
    else:
        outputs = model(input_ids=IDS, attention_mask=MASK, use_cache=False)
    found = {name: value.contiguous() for name, value in outputs.items() if isinstance(value, Tensor)}
    if isinstance(model, GenerationMixin):
        settings = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
        found["greedy"] = model.generate(IDS, **settings)
        found["static"] = model.generate(IDS, cache_implementation="static", disable_compile=True, **settings)
        found["beams"] = model.generate(IDS, num_beams=3, num_return_sequences=2, **settings)
    return found


def write_probe(model: PreTrainedModel, file: Path) -> None:
    """Probe the model and save what it computes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(probe(model), file)


def write_continuation(repo_id: str, file: Path) -> None:
    """Save what the text-generation pipeline makes of a repository with a tokenizer."""
    pipe = pipeline("text-generation", repo_id, trust_remote_code=True)
    file.write_text(pipe("w3 w5", max_new_tokens=6, do_sample=False)[0]["generated_text"])
