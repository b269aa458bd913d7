"""The query norm in a trained model: what attention's entropy owes to it, whether the power still sees it.

Letters in shapes: B batch, T tokens, H heads, D head dim.
"""

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalaformer_hf.eval.attention_weights import nala_weights, relative_entropy, softmax_weights
from nalaformer_hf.generation import load
from nalaformer_hf.modeling.attention_nala import NaLaAttention
from nalaformer_hf.training.errors import ConfigError

# Rows with fewer keys say little about entropy.
MIN_KEYS = 16
QUANTILES = (0.05, 0.5, 0.95)
FORMS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "1 + ELU": {"form": "elu"},
    "fixed power": {"form": "cosine", "norm_scale": 0.0, "tau": 1.0},
    "NaLa, cosine": {"form": "cosine"},
    "NaLa, polarity": {"form": "polarity"},
}

Row = dict[str, Any]


def read_queries(model_dir: str, text: str, num_tokens: int) -> list[tuple[NaLaAttention, Tensor, Tensor]]:
    """Run a model over a text and keep the queries and keys of its NaLa layers, after the convolution.

    Args:
        model_dir: Folder or Hub name of a NaLa language model.
        text: The text.
        num_tokens: Tokens of it to read.

    Returns:
        For each NaLa layer: itself, queries and keys (1, T, H, D).

    Raises:
        ConfigError: The model cannot be loaded or has no NaLa layers, or the text is too short.
    """
    if num_tokens <= MIN_KEYS:
        raise ConfigError(f"--tokens must be more than {MIN_KEYS}, got {num_tokens}")
    model, tokenizer = load(model_dir)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :num_tokens]
    layers = [module for module in model.modules() if isinstance(module, NaLaAttention)]
    if not layers:
        raise ConfigError(f"--model must have NaLa layers, got one of type {model.config.model_type}")
    if ids.shape[1] <= MIN_KEYS:
        raise ConfigError(f"--text must have more than {MIN_KEYS} tokens, got {ids.shape[1]}")
    kept: dict[str, list[Tensor]] = {"q": [], "k": []}
    for layer in layers:
        for name, outputs in kept.items():
            source = f"{name}_conv1d" if layer.config.use_short_conv else f"{name}_proj"
            getattr(layer, source).register_forward_hook(
                lambda *args, outputs=outputs: outputs.append(args[-1])
            )
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return [
        (layer, q.unflatten(-1, (layer.num_heads, -1)), k.unflatten(-1, (layer.num_heads, -1)))
        for layer, q, k in zip(layers, kept["q"], kept["k"], strict=True)
    ]


def entropy_rows(layers: Sequence[tuple[NaLaAttention, Tensor, Tensor]]) -> tuple[list[Row], dict[str, Any]]:
    """Correlate the entropy of attention rows with the norms of their query and keys.

    Each form attends with the same queries and keys; NaLa's constants are the model's own, and there is no
    rotary. The entropy is relative to that of equal weights. A row's key norm is the mean over its keys.

    Args:
        layers: What `read_queries` returned.

    Returns:
        A row per layer, head and form with Pearson's coefficients, and for each form the norms and entropies.
    """
    rows, points = [], {form: ([], []) for form in FORMS}
    for layer, q, k in layers:
        q_norm, k_norm = (x.norm(dim=-1)[0].T for x in (q, k))  # (H, T)
        seen = k_norm.cumsum(1) / torch.arange(1, k_norm.shape[1] + 1)
        for form, options in FORMS.items():
            entropy = relative_entropy(_weights(layer, q, k, options))[0]
            for head in range(layer.num_heads):
                norms, values = q_norm[head, MIN_KEYS:], entropy[head, MIN_KEYS:]
                points[form][0].extend(norms.tolist())
                points[form][1].extend(values.tolist())
                rows.append(
                    {
                        "layer": layer.layer_idx,
                        "head": head,
                        "form": form,
                        "correlation_with_query_norm": _correlation(norms, values),
                        "correlation_with_key_norm": _correlation(seen[head, MIN_KEYS:], values),
                        "mean_entropy": float(values.mean()),
                        "mean_query_norm": float(norms.mean()),
                        "mean_key_norm": float(k_norm[head].mean()),
                    }
                )
    return rows, points


def _weights(layer: NaLaAttention, q: Tensor, k: Tensor, options: Mapping[str, Any] | None) -> Tensor:
    if options is None:
        return softmax_weights(q, k)
    spec = layer.spec
    own = {"power": spec.power, "tau": spec.tau, "gain": spec.gain, "norm_scale": spec.norm_scale}
    return nala_weights(q, k, **(own | dict(options)))


def _correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's coefficient."""
    return float(torch.corrcoef(torch.stack((x, y)))[0, 1])


def norm_rows(name: str, layers: Sequence[tuple[NaLaAttention, Tensor, Tensor]]) -> Iterator[Row]:
    """Yield the distribution of tanh(s ||q||) per layer, for s = 1 and D^-½: where it is 1, p is constant.

    Args:
        name: Of the checkpoint.
        layers: What `read_queries` returned for it.

    Yields:
        The checkpoint, layer, scale s, quantiles of ||q|| and of tanh(s ||q||), and whether s is the model's.
    """
    for layer, q, _ in layers:
        norms = q.norm(dim=-1).flatten()
        for label, scale in (("1", 1.0), ("rsqrt_dim", q.shape[-1] ** -0.5)):
            row: Row = {"checkpoint": name, "layer": layer.layer_idx, "norm_scale": label}
            row["is_the_models"] = layer.spec.norm_scale == scale
            for quantile in QUANTILES:
                row[f"norm_{quantile}"] = float(norms.quantile(quantile))
                row[f"tanh_{quantile}"] = float(torch.tanh(scale * norms).quantile(quantile))
            yield row


def summarise_entropy(rows: Sequence[Row]) -> str:
    """Write the mean coefficients over layers and heads as a table in markdown."""
    lines = ["| form | with the query norm | with the key norm | entropy |", "|---|---|---|---|"]
    for form in FORMS:
        chosen = [row for row in rows if row["form"] == form]
        names = ("correlation_with_query_norm", "correlation_with_key_norm", "mean_entropy")
        means = [statistics.mean(row[name] for row in chosen) for name in names]
        lines.append(f"| {form} | {means[0]:+.2f} | {means[1]:+.2f} | {means[2]:.3f} |")
    return "\n".join(lines) + "\n"


def draw_entropy(points: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path) -> None:
    """Draw the entropy of each row against its query's norm, a panel a form.

    Args:
        points: What `entropy_rows` returned.
        path: Picture to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(points), 3.2), layout="constrained")
    panels = figure.subplots(1, len(points), sharex=True, sharey=True)
    for panel, (form, (norms, entropies)) in zip(panels, points.items(), strict=True):
        panel.scatter(norms, entropies, s=1, alpha=0.2)
        panel.set(title=form, xlabel="query norm")
    panels[0].set_ylabel("entropy, relative to equal weights")
    figure.savefig(path, dpi=150)


def to_markdown(rows: Sequence[Row]) -> str:
    """Write rows of equal columns as a table in markdown, numbers with three digits."""
    lines = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write rows of equal columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
