"""Inputs for the op's tests, and one call that returns everything it gives: outputs, states, every gradient.

Letters: B batch, T tokens, H heads, D head dim of q and k, V head dim of v, F feature width, R sequences.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nalaformer_hf.ops import nala_attention

FORMS = ("cosine", "polarity", "relu", "elu")
ROTARIES = (None, "phase", "axial")
BACKENDS = ("reference", "recurrent", "torch")
# Whether each is causal; token by token there is no other direction.
BACKENDS_AND_DIRECTIONS = (
    ("reference", True),
    ("reference", False),
    ("recurrent", True),
    ("torch", True),
    ("torch", False),
)


def feature_width(form: str, D: int) -> int:
    return 2 * D if form in ("cosine", "polarity") else D


def qkv(B: int, T: int, H: int, D: int, V: int, dtype=torch.float64, seed: int = 0) -> list[Tensor]:
    """Leaves that want gradients, the same values in every dtype up to its rounding."""
    gen = torch.Generator().manual_seed(seed)
    shapes = (B, T, H, D), (B, T, H, D), (B, T, H, V)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def tables(layout: str | None, form: str, T: int, D: int) -> tuple[Tensor, Tensor] | None:
    """Rotary tables (cos, sin): an angle for each pair of features, in the axial layout written twice."""
    if layout is None:
        return None
    pairs = feature_width(form, D) // 2 if layout == "phase" else D // 2
    angles = torch.arange(T)[:, None] * 10000 ** -torch.linspace(0, 1, pairs)
    if layout == "axial":
        angles = angles.repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


def state(form: str, R: int, H: int, D: int, V: int, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """A state that some keys have left: z is a sum of positive features."""
    gen = torch.Generator().manual_seed(1)
    F = feature_width(form, D)
    S = torch.randn(R, H, F, V, generator=gen, dtype=torch.float64)
    z = torch.rand(R, H, F, generator=gen, dtype=torch.float64) + 1
    return S.to(dtype).requires_grad_(), z.to(dtype).requires_grad_()


@dataclass
class Case:
    """One call of `nala_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, Tensor]:
        leaves = {"q": self.q, "k": self.k, "v": self.v}
        if self.options.get("initial_state") is not None:
            leaves["S0"], leaves["z0"] = self.options["initial_state"]
        return leaves

    def double(self) -> "Case":
        """The same numbers in float64."""
        q, k, v = (x.detach().double().requires_grad_() for x in (self.q, self.k, self.v))
        options = dict(self.options)
        if options.get("initial_state") is not None:
            S, z = (x.detach().double().requires_grad_() for x in options["initial_state"])
            options["initial_state"] = S, z
        return Case(q, k, v, options)

    def run(self, backend: str, attend=nala_attention) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Outputs (o, S, z) and gradients (q, k, v, S0, z0) of a fixed random function of the outputs."""
        o, final = attend(self.q, self.k, self.v, backend=backend, **self.options)
        outputs = {"o": o} if final is None else {"o": o, "S": final[0], "z": final[1]}
        gen = torch.Generator().manual_seed(2)
        loss = o.new_zeros((), dtype=torch.float64)
        for x in outputs.values():
            loss = loss + (x.double() * torch.randn(x.shape, generator=gen, dtype=torch.float64)).sum()
        gradients = torch.autograd.grad(loss, list(self.leaves.values()))
        return outputs, dict(zip(self.leaves, gradients, strict=True))


def make_case(
    form: str,
    T: int,
    *,
    B: int = 2,
    H: int = 2,
    D: int = 8,
    V: int = 5,
    dtype=torch.float64,
    rotary: str | None = None,
    causal: bool = True,
    bounds: list[int] | None = None,
    own_tables: bool = False,
) -> Case:
    """A case with all that this direction has: a state if causal, packed sequences if `bounds` are given.

    With `own_tables` each row has rotary tables of its own, (B, T, F/2).
    """
    B = B if bounds is None else 1
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    options = {"form": form, "causal": causal, "rotary": tables(rotary, form, T, D)}
    if own_tables:
        cos, sin = tables(rotary, form, B * T, D)
        options["rotary"] = cos.view(B, T, -1), sin.view(B, T, -1)
    options["rotary_layout"] = rotary or "phase"
    if causal:
        R = B if bounds is None else len(bounds) - 1
        options |= {"initial_state": state(form, R, H, D, V, state_dtype), "output_final_state": True}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds)
    return Case(*qkv(B, T, H, D, V, dtype), options)
