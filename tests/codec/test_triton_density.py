"""The Triton kernels of VGC with a density against the reference, bit for bit: in Triton's interpreter, and on a GPU.

The interpreter is chosen when Triton is imported, so the cases run in another process: this file, as a script.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from drawn import cut_small, kernels, layout_of
from scored import RULES, SIZES, extreme, faint, tied
from test_triton import few_eights, run, same
from torch import Tensor

import interpreted
from gradwire import VGC
from gradwire.codec import CHUNK, Inputs, Rule, Selection, reference
from gradwire.methods.base import Context


def changing(select: Callable[..., Selection], device: str) -> None:
    """Kernels against the reference where every step has another density, as under a budget."""
    layout = layout_of([33, 1, 0, 1500, 31])
    states = [[torch.zeros(layout.numel, device=device) for _ in range(2)] for _ in range(2)]
    rooms, n_sent = tuple(slot.numel for slot in layout), []
    for step, density in enumerate((0.05, 0.2, 0.05, 0.011, 1.0, 1e-9)):
        rule = VGC(alpha=0.5, max_bytes_per_step=1000).rule_in(Context(layout, step, density=density))
        assert rule == Rule(0.5, 0.999, None, 0.0, False, "paper", density)
        samples = torch.randn(4, layout.numel, generator=torch.Generator().manual_seed(step)).to(device)
        inputs, common = (samples.sum(0), samples.square().sum(0)), (layout, rule, rooms, step, CHUNK)
        one = reference.select(Inputs(*inputs, *states[0]), *common)
        same(one, select(Inputs(*inputs, *states[1]), *common))
        assert all(map(torch.equal, *states)), step
        n_sent.append(int(one.counts.sum()))
    assert n_sent[4] > n_sent[1] > n_sent[0] > n_sent[3] > n_sent[5] > 0


def check_rule(device: str, name: str) -> None:
    free, short = (run(device, RULES[name], SIZES, share, chunk=700) for share in (1.0, 0.02))
    assert int(free.counts.sum()) > int(short.counts.sum()) > 0


def check_spills(device: str) -> None:
    """More passes than the scratch has room for: later kernels ask for the limit again."""
    with few_eights():
        sizes = [777, 3000] if device == "cpu" else [777, 3_000_000]
        for name in ("3/2, more than there are", "1/8"):
            found = run(device, RULES[name], sizes, 0.1, chunk=2000)
            assert int(found.passed.sum()) > 600


def check_edges(device: str) -> None:
    def spoil(grad: Tensor, moment: Tensor) -> None:
        for part, whole in zip(tied(layout_of(SIZES), 5), (grad, moment), strict=True):
            whole[100:900] = part[100:900]
        for part, whole in zip(extreme(layout_of(SIZES), 6), (grad, moment), strict=True):
            whole[900:1400] = part[900:1400]
        grad[70], grad[71], moment[72], moment[73] = torch.inf, torch.nan, torch.inf, -torch.inf

    assert not run(device, RULES["1/2"], SIZES, 0.5, spoil=spoil).finite
    active = run(device, RULES["1/2"], SIZES, 0.5, active=[True, False, True, True, False, True])
    assert active.passed.lt(0).tolist() == [False, True, False, False, True, False]
    assert int(run(device, RULES["3/2, more than there are"], SIZES, 1.0, spoil=faint).passed.sum()) > 100
    nothing = run(device, RULES["top-k"], SIZES, 1.0, spoil=lambda grad, moment: grad.zero_())
    assert int(nothing.counts.sum()) == 0


def check_sizes(device: str) -> None:
    for size in (0, 1, 31, 33, 257, 2048):
        run(device, RULES["1/2"], [size], 0.7)
    run(device, RULES["1/2"], [65537, 3], 0.1, steps=1, tile=2048)


def check_changing(device: str) -> None:
    cut_small(device)
    changing(kernels().select, device)


CASES: dict[str, Callable[[str], None]] = {
    **{f"rule {name}": lambda device, name=name: check_rule(device, name) for name in RULES},
    "spills": check_spills,
    "edges": check_edges,
    "sizes": check_sizes,
    "density that changes": check_changing,
}


def serve() -> None:
    """In the interpreter."""
    import interpreter

    interpreter.install()
    interpreted.serve(CASES)


SEEN_ON_THE_CPU = ("rule 1", "rule everything", "rule 1/2")  # and the interpreter takes its time


@pytest.mark.parametrize("case", [case for case in CASES if case not in SEEN_ON_THE_CPU])
def test_interpreted(case: str, interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case: str) -> None:
    CASES[case]("cuda")


if __name__ == "__main__":
    serve()
