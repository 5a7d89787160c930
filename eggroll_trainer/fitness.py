"""Ready-made fitnesses, each a few lines that one could have written; higher is better."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def cross_entropy(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """The negative cross-entropy of a classifier.

    Args:
        model: Inputs → logits, `(B, classes)`, or `(B, classes, …)`.
        batch: Inputs, and the right classes, integers.
        temperature: What logits are divided by. Above 1 (2, say), members that are already sure
            still differ, which helps late in training.

    Returns:
        The mean over the batch, in nats, 0-d.

    Example:
        >>> import functools
        >>> gentle = functools.partial(cross_entropy, temperature=2.0)
        >>> gentle(torch.nn.Identity(), (torch.zeros(3, 4), torch.tensor([0, 1, 2])))
        tensor(-1.3863)
    """
    inputs, labels = batch
    return -F.cross_entropy(model(inputs) / temperature, labels)


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """The share of a batch that a classifier names rightly: no gradient, and none needed.

    Args:
        model: Inputs → logits, `(B, classes)`.
        batch: Inputs, and the right classes, integers.

    Returns:
        From 0 to 1, 0-d.
    """
    inputs, labels = batch
    hits: Tensor = model(inputs).argmax(dim=1) == labels
    return hits.to(torch.float32).mean()


def mse(model: nn.Module, batch: Batch) -> Tensor:
    """The negative mean squared error.

    Args:
        model: Inputs → predictions, of the targets' shape.
        batch: Inputs and targets.

    Returns:
        The mean over all numbers of the targets, 0-d.
    """
    inputs, targets = batch
    return -F.mse_loss(model(inputs), targets)
