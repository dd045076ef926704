"""What `import gradwire` takes beyond `import torch`: fresh processes, one with it and one without in turn.

CPU time, the least of each side: whatever else the machine does only adds to it. The first process of each kind is not
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
TORCH = "import torch"
WITH = {
    "import gradwire": "import torch, gradwire",
    "import gradwire, and all behind attach, simulate and per_sample": (
        "import torch, torch.nn.parallel, gradwire; gradwire.attach; gradwire.simulate; gradwire.per_sample"
    ),
}


def took_ms(program: str) -> float:
    """Of a process of its own."""
    timed = f"import time; begin = time.process_time(); {program}; print(1e3 * (time.process_time() - begin))"
    # without compiled Python kept on the disk every process would compile it anew
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", timed], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def rows() -> Iterator[dict[str, Any]]:
    for what, program in WITH.items():
        took: dict[str, list[float]] = {TORCH: [], program: []}
        for _ in range(1 + TURNS):
            for one, times in took.items():
                times.append(took_ms(one))
        alone_ms, both_ms = (min(times[1:]) for times in took.values())
        beyond_ms = both_ms - alone_ms
        yield {
            "what": f"{what}, beyond import torch",
            "against": f"the most it may take; import torch alone {alone_ms:.0f} ms,",
            "time_ms": beyond_ms,
            "reference_ms": MOST_MS,
            "bar": 1.0,
            "holds": beyond_ms <= MOST_MS,
        }
