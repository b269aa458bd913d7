"""Run where nalaformer_hf cannot be imported: load, probe and save checkpoints with trust_remote_code=True.

Usage: python hub_outside.py FOLDER, with checkpoints FOLDER/round1/NAME, FOLDER/auto_classes.json
(NAME to Auto class) and FOLDER/pushed.json (NAME to a repository of the Hub at HF_ENDPOINT). Writes
FOLDER/outside/*.safetensors.
"""

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import transformers
from hub_probe import write_continuation, write_probe
from transformers import AutoModelForCausalLM, PreTrainedModel

ROUNDS = 3


class Blocker(MetaPathFinder):
    """Makes the package impossible to import."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Refuse the package, leave the rest to the next finder."""
        if fullname.partition(".")[0] == "nalaformer_hf":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def load(name: str, auto_class: str, source: Path | str) -> PreTrainedModel:
    """Load with the remote code of the checkpoint."""
    model = getattr(transformers, auto_class).from_pretrained(source, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), name
    return model


def main(folder: Path) -> None:
    """Do all that the module's docstring says."""
    out = folder / "outside"
    blocker = Blocker()
    sys.meta_path.insert(0, blocker)
    auto_classes = json.loads((folder / "auto_classes.json").read_text())
    copies = []
    for name, auto_class in auto_classes.items():
        for number in range(1, ROUNDS + 1):
            model = load(name, auto_class, folder / f"round{number}" / name)
            write_probe(model, out / f"{name}-{number}.safetensors")
            model.save_pretrained(folder / f"round{number + 1}" / name)
        copies.append(model)

    # The heads, their bases and the parts beside each other, from one folder.
    causal = folder / "round1" / "causal-v1.0"
    body = load("base of a head", "AutoModel", causal)
    write_probe(body, out / "base_of_causal.safetensors")
    write_probe(load("head on a base", "AutoModelForCausalLM", causal), out / "causal_again.safetensors")
    try:
        AutoModelForCausalLM.from_pretrained(causal, trust_remote_code=False)
    except ValueError as error:
        (out / "refusal.txt").write_text(str(error))

    repositories = json.loads((folder / "pushed.json").read_text())
    for name, repo_id in repositories.items():
        pushed = load(name, auto_classes[name], repo_id)
        assert type(pushed).__module__.startswith("transformers_modules.somebody.")
        write_probe(pushed, out / f"{name}-pushed.safetensors")
    write_continuation(repositories["causal-v1.0"], out / "pipeline.txt")
    assert "nalaformer_hf" not in sys.modules

    # The package joins a process that has loaded many copies of its code.
    sys.meta_path.remove(blocker)
    import nalaformer_hf

    packaged = AutoModelForCausalLM.from_pretrained(causal, trust_remote_code=True)
    assert type(packaged) is nalaformer_hf.NaLaForCausalLM
    write_probe(packaged, out / "packaged.safetensors")
    for name, model in zip(auto_classes, copies, strict=True):
        write_probe(model, out / f"{name}-joined.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
