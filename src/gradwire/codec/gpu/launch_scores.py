"""Step 3 for CUDA where a density is wanted: the launcher of the histogram. Nothing here waits for the device."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gradwire.codec.gpu import records as kinds
from gradwire.codec.gpu import scores as scoring
from gradwire.codec.gpu.launch_decode import UNFUSED
from gradwire.codec.interface import Rule
from gradwire.codec.limits import BINS, limits
from gradwire.compile.tiles import Tiles
from gradwire.layout import Layout

ROWS, WARPS = 8, 8  # tiles of a program: its 4096 counters are cleared and added up once; not measured yet


def limited(
    grad: Tensor,
    moment: Tensor,
    state: kinds.State,
    cut: kinds.Cut,
    test: kinds.Test,
    tiles: Tiles,
    layout: Layout,
    rule: Rule,
    all_live: bool,
) -> kinds.Test:
    """The test with the limits of this step's scores."""
    assert tiles.size >= 32 * WARPS, "an element that two threads hold would be counted twice"
    rows = min(ROWS, tiles.group)
    histogram = torch.zeros(tiles.n_slots, BINS, dtype=torch.int32, device=grad.device)
    sizes = {"size": tiles.size, "group": tiles.group, "rows": rows, "num_warps": WARPS}
    scoring.histogram_kernel[(tiles.n_groups * (tiles.group // rows),)](
        grad, moment, state, cut, test, histogram, all_live=all_live, **sizes, **UNFUSED
    )
    limit = limits(histogram, layout, rule).view(torch.float32)
    return test._replace(scored=tl.constexpr(True), limit=limit)
