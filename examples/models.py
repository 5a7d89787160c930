"""The networks that the examples train: each below a million parameters."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, with an activation between them; inputs are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class Patches(nn.Module):
    """Cut images `(B, channels, H, W)` into patches `(B, patches, channels · size²)`."""

    def __init__(self, size: int, stride: int) -> None:
        super().__init__()
        self.size, self.stride = size, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(2, self.size, self.stride).unfold(3, self.size, self.stride)
        return x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def cnn(channels: int = 8) -> nn.Sequential:
    """Two convolutions and a linear layer, for images `(B, 1, 14, 14)`."""
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 4, stride=2), nn.ReLU()),  # 6 × 6
        *(nn.Conv2d(channels, 2 * channels, 3), nn.ReLU()),  # 4 × 4
        *(nn.Flatten(), nn.Linear(16 * 2 * channels, 10)),
    )


class PatchTransformer(nn.Module):
    """A small vision Transformer for images `(B, 1, 14, 14)`: 3 × 3 patches, blocks, their mean."""

    def __init__(self, width: int = 32, heads: int = 4, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Sequential(Patches(size=6, stride=4), nn.Linear(36, width))
        self.position = nn.Parameter(0.02 * torch.randn(9, width))
        block = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


def size(model: nn.Module) -> int:
    """How many parameters it has."""
    return sum(p.numel() for p in model.parameters())
