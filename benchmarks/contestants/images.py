"""The images that the contestants of vs_ddp learn, as loose files <class>/<number>.raw of 28 x 28 bytes.

Either MNIST, from its four IDX files, or made up: then ten classes of a few prototypes each, of which a sample
shows one, shifted, dimmed and under noise. Needs numpy only.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SIDE = 28
CLASSES = 10
PROTOTYPES = 3  # per class: a linear map does not tell the classes apart well
NOISE = 60.0
MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

Images = npt.NDArray[np.uint8]
"""(n, 28, 28) pixels, or (n,) classes."""


def write(folder: Path, train: int, test: int, seed: int, mnist: Path | None) -> tuple[Path, Path]:
    """``train`` loose files in folder/images and test.npz; the same bytes for the same arguments. Both paths.

    ValueError when MNIST is too small for that, OSError when it is not there.
    """
    random = np.random.default_rng(seed)
    if mnist is None:
        images, labels = made_up(train + test, random)
        parts: tuple[Images, ...] = (images[:train], labels[:train], images[train:], labels[train:])
    else:
        parts = from_mnist(mnist, train, test, random)
    for number, (image, label) in enumerate(zip(parts[0], parts[1], strict=True)):
        path = folder / "images" / str(label) / f"{number:06}.raw"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.tobytes())
    np.savez(folder / "test.npz", images=parts[2], labels=parts[3])
    return folder / "images", folder / "test.npz"


def made_up(count: int, random: np.random.Generator) -> tuple[Images, Images]:
    """Images and classes."""
    coarse = random.uniform(0, 255, (CLASSES * PROTOTYPES, 7, 7))
    prototypes = np.kron(coarse, np.ones((SIDE // 7, SIDE // 7)))
    kinds = random.integers(0, len(prototypes), count)
    images = np.empty((count, SIDE, SIDE), np.uint8)
    for i, kind in enumerate(kinds):
        shifted = np.roll(prototypes[kind], random.integers(-2, 3, 2), axis=(0, 1))
        noisy = random.uniform(0.5, 1.0) * shifted + random.normal(0, NOISE, (SIDE, SIDE))
        images[i] = np.clip(noisy, 0, 255)
    return images, (kinds % CLASSES).astype(np.uint8)


def from_mnist(folder: Path, train: int, test: int, random: np.random.Generator) -> tuple[Images, ...]:
    """Training images and classes, test images and classes: a random part of each set."""
    parts = []
    stored = [read_idx(folder / name) for name in MNIST_FILES]
    for images, labels, count in ((stored[0], stored[1], train), (stored[2], stored[3], test)):
        if len(images) < count:
            raise ValueError(f"{folder} has {len(images)} images, {count} are needed: take fewer --steps")
        chosen = random.permutation(len(images))[:count]
        parts += [images[chosen], labels[chosen]]
    return tuple(parts)


def read_idx(path: Path) -> Images:
    """An IDX file of unsigned bytes: 0, 0, 8, dimensions, each as 4 bytes, then the values."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no IDX file of bytes")
    shape: Any = np.frombuffer(data, ">i4", data[3], 4)
    values: Images = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    return values
