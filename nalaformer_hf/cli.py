"""The console command `nalaformer`: each sub-command parses its arguments and calls what does the work."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from nalaformer_hf import __version__
from nalaformer_hf.training.errors import ConfigError

INTERRUPTED = 130
# Modules that a sub-command needs beyond the plain installation, by the extra that brings them.
EXTRAS = {
    "train": ("accelerate", "datasets", "matplotlib", "omegaconf", "rich", "tensorboard"),
    "eval": ("lm_eval",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit status: 0, 1 for what the user can mend, 130 if a signal stopped it.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return _say("nalaformer: interrupted", INTERRUPTED)
    except (ConfigError, OSError) as error:
        return _say(f"nalaformer: error: {error}", 1)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all sub-commands."""
    parser = argparse.ArgumentParser(prog="nalaformer", description="Norm-aware linear attention.")
    parser.add_argument("--version", action="version", version=f"nalaformer_hf {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_train, _add_generate, _add_demo, _add_presets, _add_doctor):
        add(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    kinds = commands.add_parser("train", help="train a model").add_subparsers(required=True, metavar="KIND")
    parser = kinds.add_parser(
        "lm",
        help="train a causal language model on your text",
        description="Train a causal language model. Ctrl-C leaves a checkpoint that --resume continues.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file, or the name of a packaged recipe")
    parser.add_argument("--resume", action="store_true", help="go on with the run in train.output_dir")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="e.g. model.preset=small data.files=text/*.txt train.output_dir=out train.learning_rate=1e-3",
    )
    parser.set_defaults(run=_train_lm)


def _train_lm(arguments: argparse.Namespace) -> int:
    _need("train")
    from accelerate import PartialState

    from nalaformer_hf.training.config import load_config
    from nalaformer_hf.training.lm import train_lm

    result = train_lm(load_config(arguments.config, arguments.overrides), resume=arguments.resume)
    status, message = INTERRUPTED, f"nalaformer: stopped at {result.checkpoint}; --resume goes on from there"
    if result.finished:
        status, message = 0, f"{result.model_dir}: {result.heldout_bits_per_byte:.4f} held-out bits per byte"
    return _say(message, status) if PartialState().is_main_process else status


def _add_generate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("generate", help="continue a text, token by token")
    parser.add_argument("--model", required=True, metavar="DIR", help="folder or Hub name of a causal model")
    parser.add_argument("--prompt", default="", help="text to continue; without it, a new document begins")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token each time"
    )
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help="0 means all tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="e.g. bfloat16; auto is the checkpoint's own")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="also write the figures to a JSON file")
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from nalaformer_hf.generation import describe, load, stream, write_stats

    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "seed")}
    try:
        model, tokenizer = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
        _write(arguments.prompt)
        continuation = stream(
            model, tokenizer, arguments.prompt, _write, max_new_tokens=arguments.max_new_tokens, **sampling
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _write("\n")
    if arguments.stats is not None:
        write_stats(continuation, arguments.stats)
    return _say(describe(continuation), 0)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="train, save, reload, generate and score a small model on real text",
        description="Train a small NaLa language model, and a Llama of its size as a yardstick, on the source"
        " of Python's standard library; then reload it in a new process, generate with it and score it.",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument("--preset", default="tiny", help="the NaLa preset to train")
    parser.add_argument("--steps", type=int, default=250, metavar="N", help="optimizer steps of each model")
    parser.add_argument("--text-file", type=Path, metavar="FILE", help="train on this text instead")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier demo was interrupted")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    _need("train")
    _need("eval")
    from nalaformer_hf.training.demo import DemoSettings, run_demo

    settings = DemoSettings(
        preset=arguments.preset,
        steps=arguments.steps,
        text_file=None if arguments.text_file is None else str(arguments.text_file.resolve()),
    )
    finished = run_demo(settings, arguments.output_dir, resume=arguments.resume)
    if not finished:
        return _say("nalaformer: stopped; the same command with --resume goes on", INTERRUPTED)
    return 0


def _add_presets(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("presets", help="list the NaLa presets and their parameters")
    parser.set_defaults(run=_presets)


def _presets(arguments: argparse.Namespace) -> int:
    import torch

    from nalaformer_hf import NaLaConfig, NaLaForCausalLM
    from nalaformer_hf.modeling.configuration_nala import PRESETS

    for name in PRESETS:
        config = NaLaConfig.from_preset(name)
        with torch.device("meta"):
            count = NaLaForCausalLM(config).num_parameters()
        _write(f"{name:<22}{count:>13,} parameters, {config.num_hidden_layers} layers, {config.mixer}\n")
    return 0


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine runs, and test its kernels",
        description="Say versions, device and backends, and compare every kernel with the float64 reference"
        " on this machine. The exit status is 1 if one fails; backend 'auto' trusts the result.",
    )
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from nalaformer_hf.doctor import run_doctor

    return 0 if run_doctor(_write) else 1


def _need(extra: str) -> None:
    """Say in a sentence which extra is not installed."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this command needs {', '.join(missing)}, which are not installed:"
            f" pip install 'nalaformer-hf[{extra}]'"
        )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(message: str, status: int) -> int:
    sys.stderr.write(f"{message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
