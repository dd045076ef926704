"""Task `digits`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. They are in its package: no download."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.tools.input_errors import InputError
from gradwire.tools.train.classification import Classification
from gradwire.tools.train.task import Task, TaskKind

Array = np.ndarray[Any, Any]
SPLIT_SEED = 0  # the split is part of the task, not of the run: every --seed is measured on the same 360 digits
HIDDEN = 256


def make_network() -> nn.Module:
    """Two hidden layers, 85,002 parameters."""
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def split(targets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[Tensor, Tensor]:
    """Indices to train and to test on: shuffled, sorted by class, every fifth is for the test, so it is stratified."""
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(targets))
    by_class = torch.from_numpy(shuffled[np.argsort(targets[shuffled], kind="stable")])
    is_test = torch.arange(len(by_class)) % 5 == 0
    return by_class[~is_test], by_class[is_test]


def read_digits() -> tuple[Array, Array]:
    """Pixels float64 [1797, 64] and classes int64 [1797], out of scikit-learn's folder.

    Its `load_digits` reads the same file, but importing it takes a second, in every worker.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise InputError("task digits needs scikit-learn, which is missing: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",")
    except OSError as error:
        raise InputError(f"this scikit-learn has no {path.name}: pip install 'scikit-learn>=1.3'") from error
    return table[:, :-1], table[:, -1].astype(np.int64)


def open_digits(data: Path | None) -> Task:
    """1,437 digits to learn from and 360 to test on, pixels standardised by the mean and deviation of the former.

    They come with scikit-learn; `--data` has no meaning here.
    """
    if data is not None:
        raise InputError(f"task digits reads its data from scikit-learn and takes no --data (got {data}): leave it out")
    images, labels = read_digits()
    train, test = split(labels)
    inputs, targets = torch.from_numpy(images).float(), torch.from_numpy(labels).long()
    mean, deviation = inputs[train].mean(dim=0), inputs[train].std(dim=0).clamp(min=1.0)  # border pixels are always 0
    inputs = (inputs - mean) / deviation
    tensors = (inputs[train], targets[train], inputs[test], targets[test])
    digest = hashlib.sha256(tensors[0].numpy().tobytes() + tensors[1].numpy().tobytes()).hexdigest()
    return Classification("digits", *tensors, digest, make_network)


KIND = TaskKind(
    name="digits",
    about="scikit-learn's handwritten digits, no download",
    open=open_digits,
    epochs=12,  # within a point of its best; Dense and VGC alpha=1 both at 97.5 to 98.1 % (3 seeds)
    batch=16,
)
