"""`nalaformer analyze`: each sub-command tests a claim of the paper."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nalaformer_hf.console import need, write
from nalaformer_hf.training.errors import ConfigError

if TYPE_CHECKING:
    from nalaformer_hf.eval.queries import LayerQueries


def add_analyze(commands: argparse._SubParsersAction) -> None:
    """Add the sub-commands to those of `nalaformer`."""
    parser = commands.add_parser(
        "analyze", help="test a claim of the paper; docs/claims.md has what came out"
    )
    kinds = parser.add_subparsers(required=True, metavar="CLAIM")
    parser = kinds.add_parser("entropy", help="attention entropy against the norms of queries and keys")
    parser.add_argument("--model", required=True, metavar="DIR", help="a NaLa language or vision model")
    _add_input_options(parser)
    parser.set_defaults(run=_analyze_entropy)
    parser = kinds.add_parser("norm", help="how much of the query norm the power still sees")
    parser.add_argument(
        "--model", required=True, nargs="+", metavar="DIR", help="models, or a run's checkpoints"
    )
    _add_input_options(parser)
    parser.set_defaults(run=_analyze_norm)
    for name, text in (
        ("limit", "distance of the cosine form from the polarity form"),
        ("rotary", "sign and row sums of weights with rotary in the numerator"),
    ):
        parser = kinds.add_parser(name, help=text)
        parser.set_defaults(run=_analyze_weights, claim=name)
    _add_sweep(kinds)
    parser = kinds.add_parser("memory", help="memory and time of one layer over up to 70,225 tokens")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of a layer")
    parser.set_defaults(run=_analyze_memory)


def _add_input_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", type=Path, default=Path(argparse.__file__), metavar="FILE", help="for a language model"
    )
    source.add_argument(
        "--images", metavar="NAME", help="for a vision model: digits, a folder, or a data set on the Hub"
    )
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="how many to read of the text")
    parser.add_argument("--split", default="test", help="of the images (test)")
    parser.add_argument("--num-images", type=int, default=64, metavar="N", help="how many to take at random")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")


def _reader(arguments: argparse.Namespace) -> "Callable[[str], list[LayerQueries]]":
    """A function from a model's folder to its layers' queries."""
    from nalaformer_hf.eval import queries

    arguments.output.mkdir(parents=True, exist_ok=True)  # before the work, as it may fail
    if arguments.images is None:
        try:
            text = arguments.text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--text must be a UTF-8 text, got {arguments.text}: {error}") from error
        return lambda model: queries.read_text_queries(model, text, arguments.tokens)
    need("vision")
    images = queries.choose_images(arguments.images, arguments.split, arguments.num_images)
    return lambda model: queries.read_image_queries(model, images)


def _analyze_entropy(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.eval import norm_analysis

    rows, points = norm_analysis.entropy_rows(_reader(arguments)(arguments.model))
    norm_analysis.write_csv(rows, arguments.output / "entropy.csv")
    norm_analysis.draw_entropy(points, arguments.output / "entropy.png")
    write(norm_analysis.summarise_entropy(rows))
    return 0


def _analyze_norm(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.eval import norm_analysis

    read = _reader(arguments)
    rows = [row for model in arguments.model for row in norm_analysis.norm_rows(model, read(model))]
    norm_analysis.write_csv(rows, arguments.output / "norm.csv")
    write(norm_analysis.to_markdown(rows))
    return 0


def _analyze_weights(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.eval import attention_weights, norm_analysis

    claims = {"limit": attention_weights.polarity_limit, "rotary": attention_weights.rotary_weights}
    write(norm_analysis.to_markdown(list(claims[arguments.claim]())))
    return 0


def _add_sweep(kinds: argparse._SubParsersAction) -> None:
    parser = kinds.add_parser(
        "sweep",
        help="what λ, τ and α do to small language models",
        description="Train small language models on the standard library's source, for all λ and τ at α = 20,"
        " then for all α at λ = 3 and τ = 0.5. Points with λτ < 1 are excluded, and listed.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="continued if it is there")
    for name, default in (
        ("powers", [1.0, 2.0, 3.0, 4.0]),
        ("taus", [0.25, 0.5, 1.0]),
        ("gains", [1.0, 5.0, 20.0, 100.0]),
    ):
        parser.add_argument(f"--{name}", nargs="+", type=float, default=default, metavar="X")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=int, metavar="N", help="of each training")
    parser.set_defaults(run=_analyze_sweep)


def _analyze_sweep(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.eval import norm_analysis, sweep

    settings = sweep.SweepSettings(**({} if arguments.steps is None else {"num_steps": arguments.steps}))
    points = sweep.grid(arguments.powers, arguments.taus, arguments.gains)
    runs = sweep.run_sweep(arguments.output, points, seeds=arguments.seeds, settings=settings)
    norm_analysis.write_csv(sweep.to_rows(runs, points), arguments.output / "sweep.csv")
    sweep.draw(runs, points, arguments.output / "sweep.png")
    write(sweep.to_markdown(runs, points))
    return 0


def _analyze_memory(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.eval import layer_memory, norm_analysis

    arguments.output.mkdir(parents=True, exist_ok=True)  # before the work, as it may fail
    rows = layer_memory.measure_memory(repeats=arguments.repeats)
    norm_analysis.write_csv(rows, arguments.output / "memory.csv")
    layer_memory.draw(rows, arguments.output / "memory.png")
    write(norm_analysis.to_markdown(rows) + layer_memory.summarise(rows))
    return 0
