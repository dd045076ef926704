"""Cases of Triton kernels in Triton's interpreter.

It is chosen when Triton is imported, so they run in another process: the test's own file, as a script, which is asked
for one case after another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

GOOD = "good"
TESTS = Path(__file__).parent
Asked = subprocess.Popen[str]


def serve(cases: Mapping[str, Callable[[str], None]]) -> None:
    """In that process: runs the cases that are named on the standard input, one a line."""
    for line in sys.stdin:
        torch.manual_seed(0)
        try:
            cases[line.strip()]("cpu")
            answer = GOOD
        except BaseException:
            answer = json.dumps(traceback.format_exc())
        print(answer, flush=True)
    os._exit(0)  # taking torch apart takes as long as half of importing it


def environment() -> dict[str, str]:
    """One thread: two test processes share two cores, and the arrays are small."""
    paths = os.pathsep.join(map(str, (TESTS.parent / "src", TESTS, TESTS / "codec")))
    ours = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return os.environ | ours


@contextmanager
def process(file: str) -> Iterator[Asked]:
    """One for all cases of a file: importing torch takes longer than most of them."""
    pytest.importorskip("triton")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-W", "ignore", file], env=environment(), **pipes) as started:
        yield started
        started.stdin.close()


@pytest.fixture(scope="module")
def interpreting(request: pytest.FixtureRequest) -> Iterator[Asked]:
    """The process of the test's file; conftest.py makes it known."""
    with process(str(request.path)) as asked:
        yield asked


def ask(asked: Asked, case: str) -> None:
    """Fails with the other process's traceback."""
    asked.stdin.write(f"{case}\n")
    asked.stdin.flush()
    answer = asked.stdout.readline().strip()
    assert answer == GOOD, json.loads(answer or '"the process died"')[-3000:]
