"""The published vision model written plainly: the oracle of the tests and the peer of the speed benchmark.

Published data flow, and nothing done to make it fast: images stay (B, C, H, W), each head's features are
concatenated from two powers, the rotary embedding stacks its pairs, the softmax is written out. Parameter
names are those of the published state dict. Do not optimise this file: speed ratios are measured against it.

Letters: B batch, C channels, H and W height and width, N = H W tokens, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POWER, TAU, EPS = 3.0, 0.5, 1e-6


class RotaryTable(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        angle = 1.0 / 10000 ** torch.linspace(0, 1, dim // num_heads // 4)
        self.register_buffer("angle", angle.unsqueeze(-1).repeat(1, 2).flatten())

    def forward(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(height, device=self.angle.device)[:, None] * self.angle
        columns = torch.arange(width, device=self.angle.device)[:, None] * self.angle
        rows = rows[:, None].expand(height, width, -1)
        columns = columns[None].expand(height, width, -1)
        angles = torch.cat((rows, columns), dim=-1).flatten(0, 1)
        return angles.sin(), angles.cos()


def rotate(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


class LayerNorm2d(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkvg = nn.Linear(dim, 4 * dim)
        self.lepe = nn.Conv2d(dim, dim, 5, 1, 2, groups=dim)
        self.out_proj = nn.Linear(dim, dim)
        self.ln = nn.LayerNorm(dim)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        batch, channels, height, width = x.shape
        qkvg = self.qkvg(x.permute(0, 2, 3, 1))
        q, k, v, g = qkvg.permute(0, 3, 1, 2).contiguous().chunk(4, dim=1)
        lepe = self.lepe(v)
        q, k, v = (
            y.reshape(batch, self.num_heads, channels // self.num_heads, height * width).mT for y in (q, k, v)
        )
        mixed = self.mix(upcast(q), upcast(k), upcast(v), *rotary)
        mixed = mixed.mT.reshape(batch, channels, height, width) + lepe
        mixed = self.ln(mixed.permute(0, 2, 3, 1)) * F.silu(g.permute(0, 2, 3, 1))
        return self.out_proj(mixed).permute(0, 3, 1, 2).contiguous()


class LinearAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        num_tokens = q.shape[-2]
        norm = q.norm(dim=-1, keepdim=True)
        power = POWER * (TAU + torch.tanh(norm))
        direction = q / norm
        q = torch.cat((F.relu(direction) ** power, F.relu(-direction) ** power), dim=-1)
        k = torch.cat((F.relu(k**POWER), F.relu((-k) ** POWER)), dim=-1)
        z = 1 / (q @ k.mean(dim=-2, keepdim=True).mT + EPS)
        q = torch.cat([rotate(half, sin, cos) for half in q.chunk(2, dim=-1)], dim=-1)
        k = torch.cat([rotate(half, sin, cos) for half in k.chunk(2, dim=-1)], dim=-1)
        state = (k.mT * num_tokens**-0.5) @ (v * num_tokens**-0.5)
        return q @ state * z


class SoftmaxAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        k = k * k.shape[-1] ** -0.5
        weights = rotate(q, sin, cos) @ rotate(k, sin, cos).mT
        return weights.softmax(dim=-1) @ v


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, dim)
        self.dwconv = nn.Conv2d(inner, inner, 3, 1, 1, groups=inner)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x.permute(0, 2, 3, 1)))
        x = x.permute(0, 3, 1, 2)
        x = x + self.dwconv(x)
        return self.fc2(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


class DropPath(nn.Module):
    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return x
        kept = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(1 - self.rate)
        return x * kept / (1 - self.rate)


class Block(nn.Module):
    def __init__(
        self, dim: int, num_heads: int, inner: int, mixer: str, layer_scale: float | None, drop_path: float
    ):
        super().__init__()
        if layer_scale is not None:
            self.gamma_1 = nn.Parameter(layer_scale * torch.ones(1, dim, 1, 1))
            self.gamma_2 = nn.Parameter(layer_scale * torch.ones(1, dim, 1, 1))
        self.has_layer_scale = layer_scale is not None
        self.norm1 = LayerNorm2d(dim)
        self.attn = {"linear": LinearAttention, "softmax": SoftmaxAttention}[mixer](dim, num_heads)
        self.norm2 = LayerNorm2d(dim)
        self.ffn = FeedForward(dim, inner)
        self.cpe1 = nn.Conv2d(dim, dim, 3, 1, 1, groups=dim)
        self.cpe2 = nn.Conv2d(dim, dim, 3, 1, 1, groups=dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        gamma_1, gamma_2 = (self.gamma_1, self.gamma_2) if self.has_layer_scale else (1, 1)
        x = x + self.cpe1(x)
        x = x + self.drop_path(gamma_1 * self.attn(self.norm1(x), rotary))
        x = x + self.cpe2(x)
        return x + self.drop_path(gamma_2 * self.ffn(self.norm2(x)))


class Downsample(nn.Module):
    def __init__(self, dim: int, out_dim: int):
        super().__init__()
        self.reduction = nn.Conv2d(dim, out_dim, 3, 2, 1)
        self.norm = nn.BatchNorm2d(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.reduction(x))


class Stage(nn.Module):
    def __init__(self, dim: int, num_heads: int, blocks: list[Block], out_dim: int | None):
        super().__init__()
        self.RoPE = RotaryTable(dim, num_heads)
        self.blocks = nn.ModuleList(blocks)
        if out_dim is not None:
            self.downsample = Downsample(dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        rotary = self.RoPE(*x.shape[2:])
        for block in self.blocks:
            x = block(x, rotary)
        return self.downsample(x) if hasattr(self, "downsample") else x


class Stem(nn.Module):
    def __init__(self, num_channels: int, dim: int):
        super().__init__()
        half = dim // 2
        self.proj = nn.Sequential(
            nn.Conv2d(num_channels, half, 3, 2, 1),
            nn.BatchNorm2d(half),
            nn.GELU(),
            nn.Conv2d(half, half, 3, 1, 1),
            nn.BatchNorm2d(half),
            nn.GELU(),
            nn.Conv2d(half, half, 3, 1, 1),
            nn.BatchNorm2d(half),
            nn.GELU(),
            nn.Conv2d(half, dim, 3, 2, 1),
            nn.BatchNorm2d(dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class SlowNaLaFormer(nn.Module):
    """The published classifier; `layer_scales` holds an initial value per stage, or None for none."""

    def __init__(
        self,
        dims: list[int],
        depths: list[int],
        num_heads: list[int],
        mlp_ratios: list[float],
        mixers: tuple[str, ...] = ("linear", "linear", "softmax", "softmax"),
        layer_scales: list[float | None] | None = None,
        drop_path_rate: float = 0.0,
        projection_dim: int = 1024,
        num_classes: int = 1000,
    ):
        super().__init__()
        self.patch_embed = Stem(3, dims[0])
        last = sum(depths) - 1
        rates = iter([drop_path_rate * i / max(last, 1) for i in range(last + 1)])
        stages = []
        for i, dim in enumerate(dims):
            blocks = [
                Block(
                    dim,
                    num_heads[i],
                    int(dim * mlp_ratios[i]),
                    mixers[i],
                    layer_scales[i] if layer_scales else None,
                    next(rates),
                )
                for _ in range(depths[i])
            ]
            stages.append(Stage(dim, num_heads[i], blocks, dims[i + 1] if i + 1 < len(dims) else None))
        self.layers = nn.ModuleList(stages)
        self.proj = nn.Linear(dims[-1], projection_dim)
        self.norm = nn.BatchNorm2d(projection_dim)
        self.head = nn.Conv2d(projection_dim, num_classes, 1)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        for stage in self.layers:
            x = stage(x)
        x = self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.adaptive_avg_pool2d(F.silu(self.norm(x)), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)).flatten(1)
