"""The console command `nalaformer`: each sub-command parses its arguments and calls what does the work."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nalaformer_hf import __version__
from nalaformer_hf.analyze_command import add_analyze
from nalaformer_hf.console import need, need_models, say, write
from nalaformer_hf.eval_command import add_eval
from nalaformer_hf.training.errors import ConfigError

if TYPE_CHECKING:
    from nalaformer_hf.training.runs import RunResult

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit status: 0, 1 for what the user can mend, 130 if a signal stopped it.
    """
    parser = build_parser()
    arguments, arguments.more = parser.parse_known_args(argv)
    if "overrides" in arguments and not any(word.startswith("-") for word in arguments.more):
        arguments.overrides += arguments.more  # argparse takes only the first group of them
        arguments.more = []
    if arguments.more and not arguments.passes_more:
        parser.error(f"unrecognized arguments: {' '.join(arguments.more)}")
    try:
        need_models(getattr(arguments, "model", None))
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return say("nalaformer: interrupted", INTERRUPTED)
    except (ConfigError, OSError) as error:
        return say(f"nalaformer: error: {error}", 1)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all sub-commands."""
    parser = argparse.ArgumentParser(prog="nalaformer", description="Norm-aware linear attention.")
    parser.add_argument("--version", action="version", version=f"nalaformer_hf {__version__}")
    parser.set_defaults(passes_more=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_train,
        _add_generate,
        add_eval,
        add_analyze,
        _add_demo,
        _add_presets,
        _add_convert,
        _add_doctor,
    ):
        add(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    kinds = commands.add_parser("train", help="train a model").add_subparsers(required=True, metavar="KIND")
    parser = kinds.add_parser(
        "lm",
        help="train a causal language model on your text",
        description="Train a causal language model. Ctrl-C leaves a checkpoint that --resume continues.",
    )
    _add_run_options(
        parser,
        "model.preset=small data.files=text/*.txt train.output_dir=out train.learning_rate=1e-3",
    )
    parser.set_defaults(run=_train_lm)
    parser = kinds.add_parser(
        "image",
        help="train an image classifier on your images",
        description="Train an image classifier. Ctrl-C leaves a checkpoint that --resume continues."
        " --config digits needs no images of yours and a few minutes.",
    )
    _add_run_options(parser, "model.preset=xt data.source=photos train.output_dir=out augment.mixup=0.8")
    parser.set_defaults(run=_train_image)
    parser = kinds.add_parser(
        "lra",
        help="train an encoder on a task of Long Range Arena",
        description="Train an encoder on a task of Long Range Arena, and score it. Ctrl-C leaves a checkpoint"
        " that --resume continues. Without --config the recipe of the task is taken.",
    )
    parser.add_argument("--task", metavar="TASK", help="listops, text, retrieval, image or pathfinder")
    _add_run_options(parser, "model.attention=softmax train.seed=1 train.output_dir=out")
    parser.set_defaults(run=_train_lra)


def _add_run_options(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file, or the name of a packaged recipe")
    parser.add_argument("--resume", action="store_true", help="go on with the run in train.output_dir")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"e.g. {example}")


def _train_lm(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.training.config import load_config
    from nalaformer_hf.training.lm import train_lm

    result = train_lm(load_config(arguments.config, arguments.overrides), resume=arguments.resume)
    return _say_result(result, f"{result.heldout_bits_per_byte or 0:.4f} held-out bits per byte")


def _train_image(arguments: argparse.Namespace) -> int:
    need("train")
    need("vision")
    from nalaformer_hf.training.image import train_image
    from nalaformer_hf.training.image_config import load_image_config

    result = train_image(load_image_config(arguments.config, arguments.overrides), resume=arguments.resume)
    return _say_result(result, f"{result.top1 or 0:.2%} of the held-out images right")


def _train_lra(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.training.lra import train_lra
    from nalaformer_hf.training.lra_config import load_lra_config

    task = [] if arguments.task is None else [f"data.task={arguments.task}"]
    config = load_lra_config(arguments.config or arguments.task, [*task, *arguments.overrides])
    result = train_lra(config, resume=arguments.resume)
    return _say_result(result, f"{result.accuracy or 0:.2%} of the test items right")


def _say_result(result: "RunResult", figure: str) -> int:
    from accelerate import PartialState

    status, message = INTERRUPTED, f"nalaformer: stopped at {result.checkpoint}; --resume goes on from there"
    if result.finished:
        status, message = 0, f"{result.model_dir}: {figure}"
    return say(message, status) if PartialState().is_main_process else status


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
        write(arguments.prompt)
        continuation = stream(
            model, tokenizer, arguments.prompt, write, max_new_tokens=arguments.max_new_tokens, **sampling
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    write("\n")
    if arguments.stats is not None:
        write_stats(continuation, arguments.stats)
    return say(describe(continuation), 0)


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
    need("train")
    need("eval")
    from nalaformer_hf.training.demo import DemoSettings, run_demo

    settings = DemoSettings(
        preset=arguments.preset,
        steps=arguments.steps,
        text_file=None if arguments.text_file is None else str(arguments.text_file.resolve()),
    )
    finished = run_demo(settings, arguments.output_dir, resume=arguments.resume)
    if not finished:
        return say("nalaformer: stopped; the same command with --resume goes on", INTERRUPTED)
    return 0


def _add_presets(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("presets", help="list the NaLa presets and their parameters")
    parser.set_defaults(run=_presets)


def _presets(arguments: argparse.Namespace) -> int:
    import torch

    from nalaformer_hf import NaLaConfig, NaLaForCausalLM, NaLaForImageClassification, NaLaVisionConfig
    from nalaformer_hf.modeling.configuration_nala import PRESETS
    from nalaformer_hf.modeling.configuration_nala_vision import VISION_PRESETS

    for name in PRESETS:
        config = NaLaConfig.from_preset(name)
        with torch.device("meta"):
            count = NaLaForCausalLM(config).num_parameters()
        write(f"{name:<22}{count:>13,} parameters, {config.num_hidden_layers} layers, {config.mixer}\n")
    for name in VISION_PRESETS:
        config = NaLaVisionConfig.from_preset(name)
        with torch.device("meta"):
            count = NaLaForImageClassification(config).num_parameters()
        write(f"{name:<22}{count:>13,} parameters, vision, {sum(config.depths)} blocks in 4 stages\n")
    return 0


def _add_convert(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a published vision checkpoint to a folder for from_pretrained, or back",
        description="Convert a published vision checkpoint (.pth, .safetensors) to a folder of a model;"
        " or such a folder to a state dict with the published names.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="checkpoint file, or folder of a model")
    parser.add_argument(
        "destination", type=Path, metavar="DEST", help="folder to write; or .safetensors or .pth file"
    )
    parser.add_argument(
        "--weights", choices=("model", "model_ema"), help="which of a training checkpoint's weights to take"
    )
    parser.add_argument(
        "--mixers",
        nargs="+",
        metavar="MIXER",
        help="mixer of each stage, linear or softmax; default: linear linear softmax softmax",
    )
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from nalaformer_hf.convert import export_file, import_file

    try:
        if arguments.source.is_dir():
            if arguments.weights or arguments.mixers:
                raise ValueError("--weights and --mixers concern published checkpoints, SOURCE is a folder.")
            count = export_file(arguments.source, arguments.destination)
        else:
            count = import_file(arguments.source, arguments.destination, arguments.weights, arguments.mixers)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return say(f"{arguments.destination}: {count:,} parameters", 0)


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

    return 0 if run_doctor(write) else 1


if __name__ == "__main__":
    sys.exit(main())
