"""Methods that need no second moments keep 4 bytes a parameter beyond plain DDP, and load nothing of moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# What is freed goes back at once: else the allocator, learning from what it has freed, keeps up to 32 MB a block.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
ROWS = 2000, 8000  # of 5000 elements: larger than what the allocator keeps for itself
TRAIN = """
import ctypes, gc, json, sys, tempfile
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(5000, int(sys.argv[2]), bias=False), gradient_as_bucket_view=True)
if sys.argv[1]:
    import gradwire
    wire = gradwire.attach(model, sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = open("/proc/self/smaps_rollup")  # counted page by page; RssAnon was 60 MB off on a busy machine
    return next(1024 * int(row.split()[1]) for row in rows if row.startswith("Pss_Anon"))

for step in range(6):
    model(torch.randn(8, 5000)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
print(json.dumps([held(), [name for name in sys.modules if name.startswith("gradwire.moments")]]))
"""


def trained(spec: str, rows: int) -> tuple[int, list[str]]:
    """Bytes that a process holds between two steps, and what it has loaded of the moments; spec: none for plain DDP."""
    command = [sys.executable, "-c", TRAIN, spec, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **GIVES_BACK})
    assert done.returncode == 0, done.stderr
    n_bytes, loaded = json.loads(done.stdout.splitlines()[-1])
    return n_bytes, loaded


def bytes_a_parameter(spec: str) -> float:
    """Of a larger and a smaller model: what a process holds whatever its model is counts for nothing."""
    trained(spec, 1)  # compiles, where nobody has before: what a compiler leaves behind is no state of ours
    (small, _), (large, loaded) = (trained(spec, rows) for rows in ROWS)
    assert not loaded
    return (large - small) / (5000 * (ROWS[1] - ROWS[0]))


@pytest.fixture(scope="module")
def plain() -> float:
    return bytes_a_parameter("")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["vgc:alpha=0,density=0.01", "vgc:alpha=0,floor=0.01", "topk:density=0.01", "strom:tau=0.01"]
)
def test_four_bytes_a_parameter(spec: str, plain: float) -> None:
    beyond = bytes_a_parameter(spec) - plain
    assert 3.7 < beyond < 4.7, "the residual, and messages"
