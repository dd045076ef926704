"""What `import gradwire` takes beyond `import torch`: fresh processes, each imports torch first, then the other.

CPU time, the least of some turns: whatever else the machine does only adds to it. The first process of each kind is not
counted, because it may have to compile Python and to read it from the disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

TURNS = 9
MOST_MS = 250.0
PROGRAMS = {
    "import gradwire": ("import torch", "import gradwire"),
    "import gradwire, and all behind attach, simulate and per_sample": (
        "import torch, torch.nn.parallel",
        "import gradwire; gradwire.attach; gradwire.simulate; gradwire.per_sample",
    ),
}
TIMED = """
from time import process_time
times = [process_time()]
{}
times.append(process_time())
{}
times.append(process_time())
print(*(1e3 * (end - begin) for begin, end in zip(times, times[1:])))
"""


def took_ms(first: str, then: str) -> tuple[float, float]:
    """Of one after the other, in a process of its own."""
    # without compiled Python kept on the disk every process would compile it anew
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", TIMED.format(first, then)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    torch_ms, beyond_ms = map(float, done.stdout.split())
    return torch_ms, beyond_ms


def rows() -> Iterator[dict[str, Any]]:
    for what, programs in PROGRAMS.items():
        turns = [took_ms(*programs) for _ in range(1 + TURNS)][1:]
        torch_ms, beyond_ms = map(min, zip(*turns, strict=True))
        yield {
            "what": f"{what}, beyond import torch",
            "against": f"the most it may take; import torch alone {torch_ms:.0f} ms,",
            "time_ms": beyond_ms,
            "reference_ms": MOST_MS,
            "bar": 1.0,
            "holds": beyond_ms <= MOST_MS,
        }
