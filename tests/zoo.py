"""Modules of every kind, each with an input: what "any nn.Module" is tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

Case = tuple[nn.Module, tuple[Any, ...]]


class Calls(nn.Module):
    """Parameters by name, and a forward pass that is any function of them."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape)))

    def forward(self, *args: Any) -> Tensor:
        return self.function(self, *args)


class Tied(nn.Module):
    """A language model's shape: the embedding is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 12), nn.LayerNorm(12)
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


class TwoPaths(nn.Module):
    """One layer, reached by three names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.body = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.body(x)) + self.first(x)


class Attention(nn.Module):
    """Fused projection, heads, grouped queries, a mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.options = nn.Linear(12, 12 + 2 * 6), nn.Linear(12, 5), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([12, 6, 6], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 3)).transpose(-3, -2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.options)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Packed(nn.Module):
    """Sequences of several lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 2, 4])
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.layer(packed)
        return rnn.pad_packed_sequence(out, batch_first=True)[0]


class Cell(nn.Module):
    """A recurrent cell in a loop of the user's own."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


def algebra(m: Any, x: Tensor) -> Tensor:
    """A matrix used in every way that stays low-rank."""
    w = m.w
    y = x @ w + x @ w.T + x @ w.mT + torch.mm(x, w.t()) + (w @ x.T).T + (w @ x[0])
    y = y + torch.addmm(m.b, x, w) + torch.einsum("bi,oi->bo", x, w)
    y = y + torch.baddbmm(m.b.expand(2, 1, 8), x.view(2, 3, 8), w.expand(2, 8, 8)).view(6, 8)
    first, second = w.chunk(2)
    y = y + torch.cat([F.linear(x, first), F.linear(x, second)], dim=1)
    y = y + F.linear(x, w.narrow(0, 2, 4)).repeat(1, 2) + F.linear(x[:, 1:5], w[:, 1:5])
    return y + w[2] + w[-1] + w[torch.tensor([0, 1, 2, 3, 4, -1])] + w.diagonal() * m.s


def dense_algebra(m: Any, x: Tensor) -> Tensor:
    """A matrix used in ways for which it must be formed."""
    return x @ (m.w.tanh() * m.mask) + x @ (m.w / m.w.norm()) + m.w.flatten()[:8] + m.w.sum(0)


def outer_vmap(m: Any, x: Tensor) -> Tensor:
    """The user's own vmap, over rows, inside ours over members."""
    return torch.func.vmap(lambda row: F.linear(row, m.w, m.b).tanh())(x)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tokens(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def mask() -> Tensor:
    return torch.ones(5, 5, dtype=torch.bool).tril()


def seq() -> Tensor:
    return torch.randn(3, 5, 12)


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 4, 3, groups=2, stride=2), nn.Flatten(), nn.Linear(4, 5)),
    )


def batchnorm() -> nn.Module:
    """With statistics that training has left behind."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(2))
    model(torch.randn(8, 3, 8, 8) * 2 + 1)
    return model.eval()


def transformer(train: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True).train(train)


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


# Name → a function that makes the module and its arguments.
ZOO: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 4)), (randn(6, 8),)),
    "one_row": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), (randn(8),)),
    "width_one": lambda: (nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1)), (randn(8),)),
    "no_bias": lambda: (nn.Linear(8, 4, bias=False), (randn(6, 8),)),
    "two_paths": lambda: (TwoPaths(), (randn(6, 8),)),
    "tied": lambda: (Tied(), (tokens(20, 3, 5),)),
    "norms": lambda: (
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.PReLU()),
        (randn(6, 8),),
    ),
    "convnet": lambda: (convnet(), (images(),)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, dilation=2, padding="same"), (randn(2, 4, 9),)),
    "conv_reflect": lambda: (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (images(),)),
    "conv_depthwise": lambda: (nn.Conv2d(3, 6, 3, groups=3), (images(),)),
    "conv_unbatched": lambda: (nn.Conv2d(3, 6, 3), (images()[0],)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2), (randn(2, 2, 4, 4, 4),)),
    "conv_transpose": lambda: (
        nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
        (images(),),
    ),
    "channels_last": lambda: (
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        (images().to(memory_format=torch.channels_last),),
    ),
    "batchnorm_eval": lambda: (batchnorm(), (images(),)),
    "instance_norm": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)),
        (images(),),
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(20, 12, padding_idx=0), nn.Linear(12, 3)),
        (tokens(20, 3, 5),),
    ),
    "embedding_bag": lambda: (nn.EmbeddingBag(20, 12, mode="sum"), (tokens(20, 3, 5),)),
    "embedding_bag_max": lambda: (nn.EmbeddingBag(20, 12, mode="max"), (tokens(20, 3, 5),)),
    "bilinear": lambda: (nn.Bilinear(8, 6, 4), (randn(5, 8), randn(5, 6))),
    "attention_causal": lambda: (Attention(is_causal=True), (seq(),)),
    "attention_mask": lambda: (Attention(attn_mask=mask()), (seq(),)),
    "multihead": lambda: (nn.MultiheadAttention(12, 3, batch_first=True), (seq(), seq(), seq())),
    "multihead_cross": lambda: (
        nn.MultiheadAttention(12, 3, kdim=8, vdim=6, batch_first=True),
        (seq(), randn(3, 4, 8), randn(3, 4, 6)),
    ),
    "encoder_eval": lambda: (transformer(train=False), (seq(),)),
    "encoder_train": lambda: (transformer(train=True), (seq(),)),
    "decoder": lambda: (
        nn.TransformerDecoderLayer(12, 3, 16, dropout=0.0, batch_first=True),
        (seq(), seq()),
    ),
    "lstm": lambda: (
        nn.LSTM(12, 8, num_layers=2, bidirectional=True, batch_first=True),
        (seq(),),
    ),
    "lstm_packed": lambda: (Packed(nn.LSTM(12, 8, bidirectional=True, batch_first=True)), (seq(),)),
    "gru": lambda: (nn.GRU(12, 8), (seq(),)),
    "gru_packed": lambda: (Packed(nn.GRU(12, 8, num_layers=2, batch_first=True)), (seq(),)),
    "rnn_relu": lambda: (nn.RNN(12, 8, nonlinearity="relu"), (seq(),)),
    "lstm_cell": lambda: (Cell(nn.LSTMCell(12, 8)), (seq(),)),
    "gru_cell": lambda: (Cell(nn.GRUCell(12, 8)), (seq(),)),
    "rnn_cell": lambda: (Cell(nn.RNNCell(12, 8)), (seq(),)),
    "weight_norm": lambda: (parametrizations.weight_norm(nn.Linear(8, 4)), (randn(6, 8),)),
    "spectral_norm": lambda: (
        parametrizations.spectral_norm(nn.Linear(8, 4)).eval(),
        (randn(6, 8),),
    ),
    "algebra": lambda: (Calls(algebra, w=(8, 8), b=(8,), s=()), (randn(6, 8),)),
    "dense_algebra": lambda: (Calls(dense_algebra, w=(8, 8), mask=(8, 8)), (randn(6, 8),)),
    "einsum_kernel": lambda: (
        Calls(lambda m, x: torch.einsum("bi,koi->bko", x, m.w), w=(3, 4, 8)),
        (randn(6, 8),),
    ),
    "outer_vmap": lambda: (Calls(outer_vmap, w=(4, 8), b=(4,)), (randn(6, 8),)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """The same module and arguments at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, args = ZOO[name]()
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    return model.to(dtype), args


def readout(args: tuple[Any, ...]) -> Callable[[nn.Module], Tensor]:
    """A fitness that every output number takes part in, with a weight of its own."""

    def fitness(model: nn.Module) -> Tensor:
        out = model(*args)
        out = (out[0] if isinstance(out, tuple) else out).double().flatten()
        weights = torch.linspace(-1, 1, len(out), dtype=torch.float64, device=out.device)
        return (out.sin() * weights).mean()

    return fitness
