"""Exact second moments on a CPU: a model's forward and backward with them, against plain ones and other libraries.

Each contender and gradwire run in turn in one loop of their own (per-sample gradients of the one would push the other
out of the caches), and the median of each is taken. A row: what was timed, against what, both times, their ratio, and
the bar it has to keep.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.peers import PEERS, Step, Task, gradwire, installed, plain, tasks

Row = dict[str, Any]
ROUNDS = 9
WARM = 3


def contender(name: str, task: Task) -> Step | None:
    """None where it is not installed or cannot do this model, which is said."""
    if name == "plain":
        return plain(task, task.model())
    if not installed(name):
        print(f"{name} is not installed and was left out", file=sys.stderr)
        return None
    try:
        step = PEERS[name][1](task, task.model())
        step()
        return step
    except Exception as error:
        print(f"{name} cannot do {task.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        return None


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Milliseconds of each, taken in turn."""
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM + rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn >= WARM:
                times_ms[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(times) for name, times in times_ms.items()}


def rows(threads: int = 1, rounds: int = ROUNDS) -> list[Row]:
    """Against plain: at most the bar. Against another library: at most 1."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(1)
        return [row for task in tasks() for row in rows_of(task, threads, rounds)]
    finally:
        torch.set_num_threads(before)


def rows_of(task: Task, threads: int, rounds: int) -> list[Row]:
    """One model against every contender that can do it."""
    found: list[Row] = []
    for name in ("plain", *PEERS):
        other = contender(name, task)
        if other is None:
            continue
        turns = 3 * rounds if name == "plain" else rounds
        times_ms = medians({"other": other, "ours": gradwire(task, task.model())}, turns)
        ratio, bar = times_ms["ours"] / times_ms["other"], task.bar if name == "plain" else 1.0
        row = {"what": f"{task.name}, {threads} thread{'s' * (threads > 1)}", "against": name}
        row |= {"time_ms": times_ms["ours"], "reference_ms": times_ms["other"], "ratio": ratio}
        found.append({**row, "bar": bar, "holds": ratio <= bar})
    return found
