"""Task `fashion`: Fashion-MNIST's official files, and a small perceptron: a run takes a CPU half a minute."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.tools.input_errors import InputError
from gradwire.tools.train.classification import Classification
from gradwire.tools.train.task import Task, TaskKind

# bytes and MD5 of the official files, unpacked
FILES = {
    "train-images-idx3-ubyte": (47_040_016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": (60_008, "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": (7_840_016, "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": (10_008, "15d484375f8d13e6eb1aabb0c3f46965"),
}
PIXELS = 28 * 28
MEAN, DEVIATION = 72.94, 90.02  # of the training pixels, 0 .. 255


def make_network() -> nn.Module:
    """Two hidden layers, 235,146 parameters."""
    return nn.Sequential(nn.Linear(PIXELS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def standardised(images: Tensor) -> Tensor:
    return (images.float() - MEAN) / DEVIATION


def read_checked(folder: Path, name: str) -> bytes:
    """The bytes of one official file, packed or not, or an error that says how it differs from it."""
    n_bytes, md5 = FILES[name]
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise InputError(
            f"Fashion-MNIST: {folder / name} is missing. --data must hold {', '.join(FILES)}, or each as .gz"
        )
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(n_bytes + 1)  # a packed file may claim to be of any length
    except (OSError, EOFError) as error:
        raise InputError(f"Fashion-MNIST: {path} cannot be read ({error}). Fetch it again") from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise InputError(f"Fashion-MNIST: {path} has MD5 {found}, the official file {md5} (unpacked). Fetch it again")
    return content


def decode(content: bytes) -> Tensor:
    """uint8, of the IDX format: four bytes of which the last is the number of axes, the length of each, the numbers."""
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, 4).astype(int)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())


def open_fashion(data: Path | None) -> Task:
    """Read and check the four files in `data`: 47 MB of images stay bytes, [N, 784]."""
    if data is None:
        raise InputError("task fashion needs --data DIR, the folder of Fashion-MNIST's four official files")
    if not data.is_dir():
        raise InputError(f"Fashion-MNIST: --data {data} is not a folder")
    images, targets, test_images, test_targets = (decode(read_checked(data, name)) for name in FILES)
    tensors = (images.flatten(1), targets.long(), test_images.flatten(1), test_targets.long())
    digest = hashlib.sha256("".join(md5 for _, md5 in FILES.values()).encode()).hexdigest()
    return Classification("fashion", *tensors, digest, make_network, standardised)


KIND = TaskKind(
    name="fashion",
    about="--data DIR with Fashion-MNIST's official files",
    open=open_fashion,
    epochs=4,
    batch=32,
)
