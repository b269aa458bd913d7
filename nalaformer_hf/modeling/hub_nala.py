"""What a checkpoint carries besides its weights: an `auto_map` for all Auto classes, and a model card."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers.modeling_utils import PreTrainedModel


class _Head(NamedTuple):
    class_name: str
    pipeline_tag: str


_HEADS = {
    "AutoModel": _Head("NaLaModel", "feature-extraction"),
    "AutoModelForCausalLM": _Head("NaLaForCausalLM", "text-generation"),
    "AutoModelForSequenceClassification": _Head("NaLaForSequenceClassification", "text-classification"),
    "AutoModelForTokenClassification": _Head("NaLaForTokenClassification", "token-classification"),
    "AutoModelForQuestionAnswering": _Head("NaLaForQuestionAnswering", "question-answering"),
}
_MODELING_MODULE = "modeling_nala"
_AUTO_MAP = {
    "AutoConfig": "configuration_nala.NaLaConfig",
    **{auto_class: f"{_MODELING_MODULE}.{head.class_name}" for auto_class, head in _HEADS.items()},
}
_TAGS = ("nala", "nalaformer", "linear-attention")
# Training facts that are metadata of the card; the others become its list.
_METADATA_FACTS = ("language", "license", "datasets", "base_model")

_BODY = """
# {title}

A [NaLaFormer](https://arxiv.org/abs/2506.21137) (norm-aware linear attention) for transformers 5.24 or newer.

## Load it

With the package (`pip install nalaformer-hf`):

```python
import nalaformer_hf
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{source}")
```

Without it, from the modelling files beside the weights. This runs their code, so read them first:

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{source}", trust_remote_code=True)
```

## Model

{summary}

## Training

{training}

## Limits

{limits}
"""
_SIGNATURE = "\n<!-- Written by save_pretrained, which rewrites it until somebody edits it: {digest} -->\n"
_SIGNED = re.compile(re.escape(_SIGNATURE.strip()).replace(r"\{digest\}", "([0-9a-f]{64})") + r"\s*\Z")
# What `push_to_hub` of transformers writes where a repository has no card.
_LIBRARY_DESCRIPTION = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    "This model card has been automatically generated."
)


class HubModel(PreTrainedModel):
    """A model whose checkpoints load through every Auto class and describe themselves."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """As `PreTrainedModel.save_pretrained`, with an `auto_map` for all Auto classes and a model card.

        Each save rewrites the card, README.md, until somebody edits it. A README.md that somebody wrote stays
        as it is, in the folder and on the Hub.
        """
        # A class of the user's own, in another module, maps to itself alone.
        if type(self).__module__.rpartition(".")[2] == _MODELING_MODULE:
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **_AUTO_MAP}
        readme = Path(save_directory) / "README.md"
        users_own = None if _may_rewrite(readme) else readme.read_bytes()
        super().save_pretrained(save_directory, is_main_process, state_dict, push_to_hub, **kwargs)
        if not self.should_save_on_this_rank(is_main_process):
            return
        if users_own is not None:
            readme.write_bytes(users_own)  # a push put the Hub's card in its place
        elif not push_to_hub:
            write_model_card(self, readme)

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args, **kwargs) -> Any:
        """Puts our card where the library, about to push, put its own empty one."""
        write_model_card(self, Path(working_dir) / "README.md", repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def write_model_card(model: PreTrainedModel, readme: Path, repo_id: str | None = None) -> None:
    """Writes the model card, unless somebody wrote a text there.

    Metadata that stands there already (a licence chosen on the website, say) is kept.

    Args:
        model: The model to describe; `model.config.training_facts` says how it was trained.
        readme: The file to write.
        repo_id: The repository that the card is for, None for a folder.
    """
    if not _may_rewrite(readme):
        return
    metadata = ModelCard.load(readme).data.to_dict() if readme.is_file() else {}
    facts = dict(model.config.training_facts or {})
    known = {name: facts.pop(name) for name in _METADATA_FACTS if name in facts}
    auto_class = model._auto_class or "AutoModel"
    body = _BODY.format(
        title=type(model).__name__ if repo_id is None else repo_id.rpartition("/")[2],
        auto_class=auto_class,
        source=repo_id or "path/to/this/folder",
        summary=_bullets(_summary(model)),
        training=_bullets(facts) if facts else "No training facts were recorded with this checkpoint.",
        limits="\n".join(f"- {limit}" for limit in _limits(model.config)),
    )
    tags = dict.fromkeys([*(metadata.get("tags") or ()), *_TAGS, *(model.model_tags or ())])
    metadata = {**known, **metadata, "library_name": "transformers", "tags": list(tags)}
    if auto_class in _HEADS:
        metadata["pipeline_tag"] = _HEADS[auto_class].pipeline_tag
    text = body + _SIGNATURE.format(digest=_digest(body))
    ModelCard(f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n{text}").save(readme)


def _may_rewrite(readme: Path) -> bool:
    """Whether nobody wrote the text: no file, ours unedited, the library's empty form, or metadata alone."""
    if not readme.is_file():
        return True
    body = REGEX_YAML_BLOCK.sub("", readme.read_text(encoding="utf-8-sig", errors="replace"), count=1)
    signed = _SIGNED.search(body)
    if signed:
        return signed[1] == _digest(body[: signed.start()])
    return _digest(body) in (_digest(""), _digest_of_library_card())


def _digest(text: str) -> str:
    """Of the words, so that line endings and blank lines do not matter."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


@functools.cache
def _digest_of_library_card() -> str:
    return _digest(ModelCard.from_template(ModelCardData(), model_description=_LIBRARY_DESCRIPTION).text)


def _bullets(facts: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {' '.join(str(value).split())}" for name, value in facts.items())


def _summary(model: PreTrainedModel) -> dict[str, Any]:
    """The model in a few lines."""
    config = model.config
    num_full = config.layer_types.count("full_attention")
    layers = f"{config.num_hidden_layers}, " + (
        f"of which {num_full} softmax attention" if num_full else "all NaLa attention"
    )
    return {
        "parameters": f"{model.num_parameters():,} in {str(model.dtype).removeprefix('torch.')}",
        "layers": layers,
        "width": f"{config.hidden_size}, feed-forward {config.intermediate_size}",
        "vocabulary": config.vocab_size,
        "heads": f"{config.num_attention_heads}, {config.head_dim} wide (values {config.value_head_dim})",
        "mixer": f"{config.mixer}, {'causal' if config.is_causal else 'bidirectional'}",
        "features": config.feature_form,
        "short convolution": config.conv_size if config.use_short_conv else "none",
    }


def _limits(config: Any) -> list[str]:
    """What a reader should not expect."""
    limits = [
        "Nothing is claimed but what stands under Training: no other quality, bias or safety was measured.",
        "Not supported: tensor and pipeline parallelism, vLLM, SGLang, GGUF.",
    ]
    if config.is_causal:
        limits.append(
            "NaLa layers keep a state of constant size: long contexts cost no more memory a token, but are "
            "remembered only as far as that state holds them."
        )
    if config.has_recurrent_delta:
        limits.append(
            "Not supported: assisted and prompt-lookup decoding; a delta-rule state cannot be rolled back."
        )
    return limits
