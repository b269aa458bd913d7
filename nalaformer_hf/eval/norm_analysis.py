"""The query norm in a trained model: what attention's entropy owes to it, whether the power still sees it.

Letters in shapes: B batch, T tokens, H heads, D head dim.
"""

import csv
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalaformer_hf.eval.attention_weights import nala_weights, relative_entropy, softmax_weights
from nalaformer_hf.eval.queries import MIN_KEYS, LayerQueries

QUANTILES = (0.05, 0.5, 0.95)
FORMS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "1 + ELU": {"form": "elu"},
    "fixed power": {"form": "cosine", "norm_scale": 0.0, "tau": 1.0},
    "NaLa, cosine": {"form": "cosine"},
    "NaLa, polarity": {"form": "polarity"},
}

Row = dict[str, Any]


def entropy_rows(layers: Sequence[LayerQueries]) -> tuple[list[Row], dict[str, Any]]:
    """Correlate the entropy of attention rows with the norms of their query and keys.

    Each form attends with the same queries and keys; NaLa's constants are the model's own, and there is no
    rotary. The entropy is relative to that of equal weights. A row's key norm is the mean over its keys.

    Args:
        layers: What `read_text_queries` or `read_image_queries` returned.

    Returns:
        A row per layer, head and form with Pearson's coefficients over the rows of all texts or images, and
        for each form the norms and entropies.
    """
    rows, points = [], {form: ([], []) for form in FORMS}
    for layer in layers:
        q_norm, k_norm = layer.q.norm(dim=-1), layer.k.norm(dim=-1)  # (B, T, H)
        seen = _mean_of_seen(k_norm, layer.causal)
        first = MIN_KEYS if layer.causal else 0
        for form, options in FORMS.items():
            entropy = _entropy(layer, options)
            for head in range(layer.q.shape[2]):
                norms, keys, values = (x[:, first:, head].flatten() for x in (q_norm, seen, entropy))
                points[form][0].extend(norms.tolist())
                points[form][1].extend(values.tolist())
                rows.append(
                    {
                        "layer": layer.layer,
                        "head": head,
                        "form": form,
                        "correlation_with_query_norm": _correlation(norms, values),
                        "correlation_with_key_norm": _correlation(keys, values),
                        "mean_entropy": float(values.mean()),
                        "mean_query_norm": float(norms.mean()),
                        "mean_key_norm": float(k_norm[..., head].mean()),
                    }
                )
    return rows, points


def _mean_of_seen(k_norm: Tensor, causal: bool) -> Tensor:
    """For each row the mean norm of its keys, (B, T, H)."""
    if not causal:
        return k_norm.mean(1, keepdim=True).expand_as(k_norm)
    return k_norm.cumsum(1) / torch.arange(1, k_norm.shape[1] + 1).unsqueeze(-1)


def _entropy(layer: LayerQueries, options: Mapping[str, Any] | None) -> Tensor:
    """(B, T, H), one text or image at a time: the weights are large."""
    parts = []
    for q, k in zip(layer.q.split(1), layer.k.split(1), strict=True):
        if options is None:
            weights = softmax_weights(q, k, causal=layer.causal)
        else:
            spec = layer.spec
            own = {"power": spec.power, "tau": spec.tau, "gain": spec.gain, "norm_scale": spec.norm_scale}
            own |= {"causal": layer.causal, "eps": torch.finfo(q.dtype).tiny}  # rows must sum to 1
            weights = nala_weights(q, k, **(own | dict(options)))
        parts.append(relative_entropy(weights, causal=layer.causal).transpose(1, 2))
    return torch.cat(parts)


def _correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's coefficient; NaN where x is one number up to rounding, as the key norm of a single image."""
    if x.std() <= 1e-6 * x.abs().max():
        return math.nan
    return float(torch.corrcoef(torch.stack((x, y)))[0, 1])


def norm_rows(name: str, layers: Sequence[LayerQueries]) -> Iterator[Row]:
    """Yield the distribution of tanh(s ||q||) per layer, for s = 1 and D^-½: where it is 1, p is constant.

    Args:
        name: Of the checkpoint.
        layers: What `read_text_queries` or `read_image_queries` returned for it.

    Yields:
        The checkpoint, layer, scale s, quantiles of ||q|| and of tanh(s ||q||), and whether s is the model's.
    """
    for layer in layers:
        norms = layer.q.norm(dim=-1).flatten()
        for label, scale in (("1", 1.0), ("rsqrt_dim", layer.q.shape[-1] ** -0.5)):
            row: Row = {"checkpoint": name, "layer": layer.layer, "norm_scale": label}
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
