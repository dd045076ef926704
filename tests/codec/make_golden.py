"""Writes the golden files: `python tests/codec/make_golden.py`. Only for a new version of the format.

Each case is three files of little-endian words: NAME.elements.bin (places, then codes), NAME.words.bin (format 1) and
NAME.compact.bin (format 2: K orders, then the body). FORMAT.version2.bin are whole messages, one of each format; those
of version 1 stay, as what must be refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire import FP8, VGC
from gradwire.codec import compact, header, words
from gradwire.codec.form import Blocks
from gradwire.layout import Layout
from gradwire.methods import Context

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Case:
    name: str
    numels: tuple[int, ...]
    capacity: tuple[int, ...]
    hybrid: bool = False
    chunk: int = 1 << 28

    @property
    def blocks(self) -> Blocks:
        layout = Layout.of((f"tensor{k}", (numel,)) for k, numel in enumerate(self.numels))
        return Blocks.of(layout, self.capacity, self.hybrid)


CASES = (
    Case("sparse", (5000, 33, 0, 70000), (40, 2, 0, 300)),
    Case("dense", (600, 31), (600, 31)),
    Case("signs", (65537, 1), (900, 1), hybrid=True),
    Case("chunks", (1000, 1000), (100, 100), chunk=256),
)

METHODS = {"words": VGC(alpha=1.0, wire="words"), "compact": VGC(alpha=1.0), "fixed": FP8()}
LAYOUT = Layout.of([("weight", (5, 7)), ("bias", (5,))])
CONTEXT = Context(LAYOUT, step=3, capacity=(21, 3))


def message(format: str) -> Tensor:
    """One rank's whole message in METHODS' format."""
    random = np.random.Generator(np.random.PCG64(7))
    grad, moment = torch.from_numpy(random.uniform([[-1.0], [0.0]], 1.0, (2, LAYOUT.numel)).astype(np.float32))
    method = METHODS[format]
    return method.encode(grad, moment / 2, method.init(LAYOUT, torch.device("cpu")), CONTEXT).data


def draw(case: Case) -> tuple[Tensor, Tensor]:
    """Places and codes: nine tenths of every tensor's capacity, some at random, some side by side."""
    random = np.random.Generator(np.random.PCG64(len(case.name)))
    places, offset = [], 0
    for numel, room in zip(case.numels, case.capacity, strict=True):
        run = np.arange(room // 5) + numel // 3
        rest = random.permutation(np.setdiff1d(np.arange(numel), run))[: room - room // 10 - len(run)]
        places.append(offset + np.sort(np.concatenate([run, rest])))
        offset += numel
    index = torch.from_numpy(np.concatenate(places).astype(np.int64))
    distance = np.minimum(random.geometric(0.3, len(index)) - 1, 7) * (not case.hybrid)
    return index, torch.from_numpy((distance + 8 * random.integers(0, 2, len(index))).astype(np.int32))


def stored(name: str) -> Tensor:
    """The words of a file."""
    return torch.from_numpy(np.fromfile(FOLDER / name, "<i4").astype(np.int32))


def save(name: str, *parts: Tensor) -> None:
    (FOLDER / name).write_bytes(torch.cat([part.int() for part in parts]).numpy().astype("<i4").tobytes())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in CASES:
        index, code = draw(one)
        save(f"{one.name}.elements.bin", index, code)
        save(f"{one.name}.words.bin", words.pack(index, code, one.chunk))
        save(f"{one.name}.compact.bin", *compact.pack(index, code, one.blocks))
    for format in METHODS:
        save(f"{format}.version{header.VERSION}.bin", message(format))
