"""Every kind of module, at a realistic size: `auto` must never be slower than `sequential`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from eggroll_trainer import EGGROLLTrainer

Case = tuple[nn.Module, tuple[Tensor, ...]]


class Custom(nn.Module):
    """Matrix products, views and look-ups written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.v = nn.Parameter(torch.randn(width))
        self.k = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → (B, width)."""
        y = (x @ self.w).tanh() @ self.w.T + self.v
        y = y + torch.einsum("bd,ed->be", x, self.w) + torch.addmm(self.v, x, self.w.t())
        y = y + torch.matmul(self.w, x.T).T + self.w[2] + torch.einsum("bd,kde->be", x, self.k)
        return y * self.w.diagonal()


class Tied(nn.Module):
    """A language model's embedding and head in one matrix."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(tokens, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) → (B, T, tokens)."""
        return self.head(self.norm(self.embedding(ids)))


class TwoPaths(nn.Module):
    """One submodule, reached by three paths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b, self.c = self.a, nn.Sequential(self.a, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → (B, width)."""
        return self.b(self.c(x))


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) → (B, heads, T, width / heads)."""
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def zoo() -> dict[str, Case]:
    """Name → module and inputs."""
    torch.manual_seed(0)
    x, image = torch.randn(32, 128), torch.randn(16, 3, 28, 28)
    sequence, ids = torch.randn(4, 32, 128), torch.randint(0, 1000, (4, 32))
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, groups=2, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10),
    )  # fmt: skip
    transformer: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    cases: dict[str, Case] = {
        "MLP": (nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)), (x,)),
        "Linear without bias": (nn.Linear(128, 128, bias=False), (x,)),
        "Bilinear": (nn.Bilinear(64, 64, 32), (x[:, :64], x[:, 64:])),
        "CNN": (cnn, (image,)),
        "Conv1d": (nn.Conv1d(16, 32, 5, dilation=2), (torch.randn(8, 16, 128),)),
        "Conv3d": (nn.Conv3d(4, 8, 3), (torch.randn(4, 4, 12, 12, 12),)),
        "ConvTranspose2d": (nn.ConvTranspose2d(16, 8, 3, stride=2), (torch.randn(8, 16, 14, 14),)),
        "BatchNorm in eval": (
            nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)).eval(),
            (image,),
        ),
        "LayerNorm, RMSNorm": (
            nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.RMSNorm(128)),
            (x,),
        ),
        "Embedding": (nn.Sequential(nn.Embedding(1000, 128), nn.Linear(128, 10)), (ids,)),
        "EmbeddingBag": (nn.EmbeddingBag(1000, 128), (ids,)),
        "tied weights": (Tied(1000, 128), (ids,)),
        "one module, three paths": (TwoPaths(128), (x,)),
        "custom products": (Custom(128), (x,)),
        "attention": (Attention(128), (sequence,)),
        "MultiheadAttention": (nn.MultiheadAttention(128, 4, batch_first=True), (sequence,) * 3),
        "encoder layer, eval": (
            nn.TransformerEncoderLayer(128, 4, 256, **transformer).eval(),
            (sequence,),
        ),
        "encoder layer, train": (
            nn.TransformerEncoderLayer(128, 4, 256, **transformer),
            (sequence,),
        ),
        "decoder layer": (
            nn.TransformerDecoderLayer(128, 4, 256, **transformer).eval(),
            (sequence, sequence),
        ),
        "LSTM": (nn.LSTM(128, 64, 2, bidirectional=True, batch_first=True), (sequence,)),
        "GRU": (nn.GRU(128, 128, batch_first=True), (sequence,)),
        "RNN": (nn.RNN(128, 128, batch_first=True), (sequence,)),
        "LSTMCell": (nn.LSTMCell(128, 128), (x,)),
        "GRUCell": (nn.GRUCell(128, 128), (x,)),
        "channels_last": (
            nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last),
            (torch.randn(16, 16, 14, 14).to(memory_format=torch.channels_last),),
        ),
        "weight_norm": (weight_norm(nn.Linear(128, 128)), (x,)),
        "float64": (nn.Linear(128, 128).double(), (x.double(),)),
    }
    for module, inputs in cases.values():
        module(*inputs)  # lazy modules take shape
    return cases


def fitness(inputs: tuple[Tensor, ...]) -> Callable[[nn.Module], Tensor]:
    """A number out of whatever the module returns."""

    def score(model: nn.Module) -> Tensor:
        output = model(*inputs)
        output = output[0] if isinstance(output, tuple) else output
        return output.square().mean()

    return score


def trainer(case: Case, evaluation: str, matricize: bool, population_size: int) -> EGGROLLTrainer:
    """A trainer of a case."""
    model, inputs = case
    return EGGROLLTrainer(
        model.parameters(),
        model=model,
        fitness_fn=fitness(inputs),
        population_size=population_size,
        sigma=0.01,
        seed=0,
        matricize=matricize,
        evaluation=evaluation,
    )
