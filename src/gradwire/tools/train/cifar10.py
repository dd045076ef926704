"""Task `cifar10`: the official binary files, and the network of the paper's experiment (docs: method, Experiments)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.tools.input_errors import InputError
from gradwire.tools.train.classification import Classification
from gradwire.tools.train.task import Schedule, Task, TaskKind

# MD5 of the files of the original cifar-10-binary.tar.gz
FILES = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32  # label, then the red, green and blue planes
FILE_BYTES = 10_000 * RECORD_BYTES
SUBFOLDER = "cifar-10-batches-bin"  # what the archive unpacks to
EVALUATION_BATCH = {"cpu": 250, "cuda": 2500}

# Channels and the dropout after each convolution; a block ends with 2 x 2 max pooling.
BLOCKS: tuple[tuple[tuple[int, float], ...], ...] = (
    ((64, 0.3), (64, 0.0)),
    ((128, 0.4), (128, 0.0)),
    ((256, 0.4), (256, 0.4), (256, 0.0)),
    ((512, 0.4), (512, 0.4), (512, 0.0)),
    ((512, 0.4), (512, 0.4), (512, 0.0)),
)


def make_network() -> nn.Sequential:
    """3 x 3 convolutions + batch norm + ReLU, then two linear layers, all without bias: 14,987,200 parameters."""
    layers: list[nn.Module] = []
    channels = IMAGE_SHAPE[0]
    for block in BLOCKS:
        for width, dropout in block:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(channels, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()]
    layers += [nn.Dropout(0.5), nn.Linear(512, 10, bias=False)]
    return nn.Sequential(*layers)


def task_of(images: Tensor, targets: Tensor, test_images: Tensor, test_targets: Tensor) -> Classification:
    """Images stay bytes in memory (150 MB) and become floats in 0 .. 1 batch by batch. No augmentation."""
    digest = hashlib.sha256("".join(FILES.values()).encode()).hexdigest()
    tensors = (images, targets, test_images, test_targets)
    return Classification("cifar10", *tensors, digest, make_network, scaled, EVALUATION_BATCH)


def scaled(images: Tensor) -> Tensor:
    return images.float() / 255


def read_checked(path: Path, md5: str) -> bytes:
    """The bytes of one official file, or an error that says how it differs from it."""
    if not path.is_file():
        raise InputError(
            f"CIFAR-10: {path} is missing. --data must hold {', '.join(FILES)} of the official cifar-10-binary.tar.gz"
        )
    content = path.read_bytes()
    if len(content) != FILE_BYTES:
        raise InputError(
            f"CIFAR-10: {path} has {len(content):,} bytes, the official file {FILE_BYTES:,}. Unpack the archive again"
        )
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise InputError(f"CIFAR-10: {path} has MD5 {found}, the official file {md5}. Unpack the archive again")
    return content


def decode(content: bytes) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of one file."""
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD_BYTES).copy())
    return records[:, 1:].reshape(-1, *IMAGE_SHAPE), records[:, 0].long()


def open_cifar10(data: Path | None) -> Task:
    """Read and check the six files in `data`, or in the folder the official archive unpacks to inside it."""
    if data is None:
        raise InputError(
            "task cifar10 needs --data DIR, the folder of the official files data_batch_1.bin ... test_batch.bin"
        )
    if not data.is_dir():
        raise InputError(f"CIFAR-10: --data {data} is not a folder")
    folder = data / SUBFOLDER if (data / SUBFOLDER).is_dir() else data
    parts = [decode(read_checked(folder / name, md5)) for name, md5 in FILES.items()]
    images, targets = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    return task_of(images, targets, *parts[-1])


KIND = TaskKind(
    name="cifar10",
    about="--data DIR with the official binary files",
    open=open_cifar10,
    epochs=300,
    batch=64,
    sgd=Schedule(0.05, times_workers=True, halve_every=25),
    weight_decay=5e-4,
)
