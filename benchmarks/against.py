"""Today's code against an older one, benchmark by benchmark and in turn: did a change make anything slower?

    python -m benchmarks against 8f011b7 encode_cpu methods_cpu --rounds 3

Every round runs a benchmark once with each side's own files, in a process of its own, the sides in alternating order.
A row's ratio is the median over the rounds of new / old within a round, so that a busy machine slows both; beside it
stands the same of what the row is measured against, which both sides run alike: how far that is from 1 is noise.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradwire.tools.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("benchmark", "what", "against", "old", "new", "unit", "ratio", "least", "most", "ratio of against")
ROWS = """
import importlib, json, sys
for row in importlib.import_module("benchmarks." + sys.argv[1]).rows():
    print("ROW " + json.dumps(row, default=str), flush=True)
"""
Key = tuple[str, str, str]  # what, against, unit
Figures = tuple[float, float]  # measured, and what it is measured against


@contextmanager
def checkout(old: str) -> Iterator[Path]:
    """The files of a commit; a folder is taken as it is (where git knows nothing of the files)."""
    if Path(old).is_dir():
        yield Path(old).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, old], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def measured(root: Path, name: str) -> dict[Key, Figures]:
    """Every row that has a figure, once, with the files of one side."""
    paths = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", ROWS, name], cwd=root, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise SystemExit(f"{name} has failed in {root}: its error is above")
    lines = done.stdout.decode().splitlines()
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
    return dict(found for row in rows if (found := figures_of(row)))


def figures_of(row: dict[str, Any]) -> tuple[Key, Figures] | None:
    if "time_ms" in row:
        return (row["what"], row["against"], "ms"), (row["time_ms"], row["reference_ms"])
    if "value" in row:
        return (row["what"], row["against"], row.get("unit", "")), (row["value"], row["reference"])
    return None


def compared(old: Path, name: str, rounds: int) -> list[dict[str, Any]]:
    """The rows that both sides have."""
    pairs: defaultdict[Key, list[tuple[Figures, Figures]]] = defaultdict(list)
    for number in range(rounds):
        sides = [old, ROOT] if number % 2 == 0 else [ROOT, old]
        found = {side: measured(side, name) for side in sides}
        for key in found[old].keys() & found[ROOT].keys():
            pairs[key].append((found[old][key], found[ROOT][key]))
        print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return [summary(name, key, times) for key, times in sorted(pairs.items())]


def summary(name: str, key: Key, rounds: list[tuple[Figures, Figures]]) -> dict[str, Any]:
    ratios = [new[0] / old[0] if old[0] else 1.0 for old, new in rounds]
    against = [new[1] / old[1] if old[1] else 1.0 for old, new in rounds]
    what, reference, unit = key
    old, new = (median(side[0] for side in column) for column in zip(*rounds, strict=True))
    row = {
        "benchmark": name,
        "what": what,
        "against": reference,
        "old": f"{old:.5g}",
        "new": f"{new:.5g}",
        "unit": unit,
    }
    row |= {"ratio": f"{median(ratios):.3f}", "least": f"{min(ratios):.3f}", "most": f"{max(ratios):.3f}"}
    return row | {"ratio of against": f"{median(against):.3f}"}


def run(old: str, names: list[str], rounds: int, out: Path | None) -> None:
    command = f"python -m benchmarks against {old} {' '.join(names)} --rounds {rounds}"
    origin = provenance("cuda" if torch.cuda.is_available() else "cpu", command)
    rows = []
    with checkout(old) as tree:
        for name in names:
            found = compared(tree, name, rounds)
            rows += [row | origin for row in found]
            for row in found:
                spread = f"({row['least']} to {row['most']}; against {row['ratio of against']})"
                print(f"{row['ratio']} {spread}  {name}: {row['what']} | {row['against']}", flush=True)
            if out:
                _write(out, rows)


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
