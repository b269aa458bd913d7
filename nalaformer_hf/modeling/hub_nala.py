"""What a checkpoint carries besides its weights: an `auto_map` for all Auto classes, and a model card."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers.modeling_utils import PreTrainedModel


class Head(NamedTuple):
    """A model class with its pipeline tag."""

    class_name: str
    pipeline_tag: str


class HubFamily(NamedTuple):
    """What the checkpoints of one family of models say of themselves.

    `heads` is by Auto class; `summary` and `limits` are the model card's lists.
    """

    config: str
    modeling_module: str
    heads: dict[str, Head]
    tags: tuple[str, ...]
    summary: Callable[[Any], dict[str, Any]]
    limits: Callable[[Any], list[str]]

    @property
    def auto_map(self) -> dict[str, str]:
        """The code of each Auto class, as a config names it."""
        models = {auto: f"{self.modeling_module}.{head.class_name}" for auto, head in self.heads.items()}
        return {"AutoConfig": self.config, **models}


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

    hub_family: ClassVar[HubFamily]

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
        if type(self).__module__.rpartition(".")[2] == self.hub_family.modeling_module:
            self.config.auto_map = {
                **(getattr(self.config, "auto_map", None) or {}),
                **self.hub_family.auto_map,
            }
        readme = Path(save_directory) / "README.md"
        users_own = None if _may_rewrite(readme) else readme.read_bytes()
        super().save_pretrained(save_directory, is_main_process, state_dict, push_to_hub, **kwargs)
        if not self.should_save_on_this_rank(is_main_process):
            return
        if users_own is not None:
            readme.write_bytes(users_own)  # a push put the Hub's card in its place
        elif not push_to_hub:
            write_model_card(self, readme)
            self._write_extras(Path(save_directory))

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args, **kwargs) -> Any:
        """Puts our card where the library, about to push, put its own empty one."""
        write_model_card(self, Path(working_dir) / "README.md", repo_id)
        self._write_extras(Path(working_dir))
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _write_extras(self, folder: Path) -> None:
        """Writes what else a checkpoint of the family carries."""


def write_model_card(model: HubModel, readme: Path, repo_id: str | None = None) -> None:
    """Writes the model card, unless somebody wrote a text there.

    Metadata that stands there already (a licence chosen on the website, say) is kept.

    Args:
        model: The model to describe; `model.config.training_facts` says how it was trained.
        readme: The file to write.
        repo_id: The repository that the card is for, None for a folder.
    """
    if not _may_rewrite(readme):
        return
    family = model.hub_family
    metadata = ModelCard.load(readme).data.to_dict() if readme.is_file() else {}
    facts = dict(model.config.training_facts or {})
    known = {name: facts.pop(name) for name in _METADATA_FACTS if name in facts}
    auto_class = model._auto_class or "AutoModel"
    body = _BODY.format(
        title=type(model).__name__ if repo_id is None else repo_id.rpartition("/")[2],
        auto_class=auto_class,
        source=repo_id or "path/to/this/folder",
        summary=_bullets(family.summary(model)),
        training=_bullets(facts) if facts else "No training facts were recorded with this checkpoint.",
        limits="\n".join(f"- {limit}" for limit in family.limits(model.config)),
    )
    tags = dict.fromkeys([*(metadata.get("tags") or ()), *family.tags, *(model.model_tags or ())])
    metadata = {**known, **metadata, "library_name": "transformers", "tags": list(tags)}
    if auto_class in family.heads:
        metadata["pipeline_tag"] = family.heads[auto_class].pipeline_tag
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
