"""Byte counts of a run, from its file: what one worker hands to the collective a step, at a few places of the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gradwire.exchange.counting import Stats
from gradwire.tools.input_errors import InputError, at_least
from gradwire.tools.result_files import append, read

BYTES, DENSE = ("bytes_a_step", "bytes"), ("dense_bytes_a_step", "dense_bytes")  # of an experiment, of StepBytes


@dataclass(frozen=True)
class Sample:
    """A step of a run, or a round of local steps: the median one of a section."""

    place: int  # the epoch or step it stands in
    n_bytes: float
    dense_bytes: float  # a step
    steps: int = 1  # of the round, at whose end the bytes go


@dataclass(frozen=True)
class ByteTrace:
    """Sections of one length, a sample each, and how many steps the run had."""

    samples: list[Sample]
    steps: int

    @property
    def collective(self) -> str:
        """Sums send all elements, in 32 or 16 bits; whatever sends less makes messages, which are gathered."""
        whole = all(round(s.dense_bytes / s.n_bytes, 3) in (1, 2) for s in self.samples)
        return "sum" if whole else "gather"


def load(path: Path, n_samples: int) -> ByteTrace:
    """The samples of a file with a row an epoch (`gradwire experiment`) or a row a step (`StepBytes`)."""
    at_least({"--samples": (n_samples, 1)})
    if not path.is_file():
        raise InputError(f"{path} is no file")
    try:
        rows = read(path)
    except UnicodeDecodeError:
        rows = []
    names = [next((name for name in choice if rows and name in rows[0]), None) for choice in (BYTES, DENSE)]
    if None in names:
        raise InputError(
            f"{path} is no trace: a CSV with the columns bytes_a_step and dense_bytes_a_step (of an experiment), "
            "or bytes and dense_bytes (of StepBytes)"
        )
    every = [_sample(path, number, row, str(names[0]), str(names[1])) for number, row in enumerate(rows, 1)]
    every = rounds(path, every)
    last = rows[-1].get("step") or ""
    return ByteTrace(thin(every, n_samples), int(last) if last.isdecimal() else len(rows))


def _sample(path: Path, number: int, row: dict[str, str], n_bytes: str, dense: str) -> Sample:
    try:
        place = int(row.get("epoch") or row.get("step") or number)
        sample = Sample(place, float(row[n_bytes]), float(row[dense]))
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}, row {number}: {error}") from error
    quiet = sample.n_bytes == 0 and n_bytes == BYTES[1]  # a step inside a round of local steps
    if not all(0 < value < math.inf for value in (sample.n_bytes or quiet, sample.dense_bytes)):
        raise InputError(f"{path}, row {number}: bytes must be positive numbers")
    return sample


def rounds(path: Path, every: Sequence[Sample]) -> list[Sample]:
    """Steps that sent nothing, as one with the first after them that did; what follows the last such is left out."""
    found: list[Sample] = []
    begin = 0
    for number, sample in enumerate(every):
        if sample.n_bytes:
            found.append(replace(sample, steps=number + 1 - begin))
            begin = number + 1
    if not found:
        raise InputError(f"{path}: not a byte was sent, so there is nothing to replay")
    return found


def thin(every: Sequence[Sample], n_samples: int) -> list[Sample]:
    """Of so many sections, as equal as they can be, the sample with the median number of bytes."""
    n_samples = min(n_samples, len(every))
    ends = [len(every) * number // n_samples for number in range(n_samples + 1)]
    sections = [sorted(every[a:b], key=lambda s: s.n_bytes) for a, b in itertools.pairwise(ends)]
    return [section[(len(section) - 1) // 2] for section in sections]


class HasStats(Protocol):
    """A Wire, or a Simulation."""

    def stats(self) -> Stats: ...


class StepBytes:
    """`trace = StepBytes(wire_or_simulation, "trace.csv")`, and `trace.step()` after every step: a row of its bytes."""

    def __init__(self, source: HasStats, path: str | Path) -> None:
        self._source, self._path, self._before = source, Path(path), source.stats()

    def step(self) -> None:
        now, before = self._source.stats(), self._before
        sent, dense = now.bytes_sent - before.bytes_sent, now.dense_bytes - before.dense_bytes
        append(self._path, {"step": str(now.steps), "bytes": str(sent), "dense_bytes": str(dense)})
        self._before = now
