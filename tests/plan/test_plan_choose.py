"""The verdict: which method, and the sentence that says why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradwire.plan.choose import choose, pays_below
from gradwire.plan.model import Cost, Network, Work

WORK = Work((10_000_000,) * 4, 100.0, 300.0, 20.0)
DENSE = Cost("dense", "sum", 4.0, 0.0, 0.01, 0.0, 0.0, 0.0, 1.0)
BF16 = Cost("bf16", "sum", 2.0, 0.0, 0.02, 0.02, 0.0, 0.0, 1.0)
VGC = Cost("vgc", "gather", 0.02, 40.0, 1.0, 0.5, 0.1, 0.4, 1.1, room=True)
POWERSGD = Cost("powersgd", "rounds", 0.1, 0.0, 2.0, 4.0, 0.0, 0.2, 1.0, 2)
ALL = [DENSE, BF16, VGC, POWERSGD]


def test_a_slow_link_asks_for_compression():
    verdict = choose(WORK, Network(4, 100.0, 0.1), ALL)
    assert verdict.chosen == "vgc"
    assert list(verdict.predictions) == ["dense", "bf16", "vgc", "powersgd"]
    less = 1 - verdict.predictions["vgc"].step_ms / verdict.predictions["bf16"].step_ms
    assert 0.9 < less < 1
    assert verdict.words.startswith(f"vgc: on this link (100 Mbit/s, 4 workers) a step takes {100 * less:.0f} % less, ")
    assert verdict.words.endswith(" ms with bf16")


@pytest.mark.parametrize("mbit", [1e6, math.inf])
def test_a_fast_link_asks_for_none(mbit):
    verdict = choose(WORK, Network(4, mbit, 0.001), ALL)
    assert verdict.chosen in ("dense", "bf16")
    best = min(verdict.predictions[spec].step_ms for spec in ("vgc", "powersgd"))
    cost = best / verdict.predictions[verdict.chosen].step_ms - 1
    assert 0.05 < cost < 0.5
    where = "no limit" if math.isinf(mbit) else "1e+06 Mbit/s"
    shown = f"{100 * cost:.0f} %" if cost >= 0.1 else f"{100 * cost:.2g} %"
    assert verdict.words == f"{verdict.chosen}: on this link ({where}, 4 workers) compression would cost {shown}"


def test_a_small_win_is_not_worth_the_information():
    fast = Cost("topk", "gather", 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    work = Work((10_000_000,) * 40, 100.0, 3000.0, 20.0)
    network = Network(4, 30_000.0, 0.0)
    verdict = choose(work, network, [DENSE, BF16, fast], margin=0.05)
    saved = 1 - verdict.predictions["topk"].step_ms / verdict.predictions["bf16"].step_ms
    assert 0 < saved < 0.05
    assert verdict.chosen == "bf16"
    assert f"compression would save {100 * saved:.2g} % (topk), which is within the margin of 5%" in verdict.words
    assert choose(work, network, [DENSE, BF16, fast], margin=0.0).chosen == "topk"


def test_without_a_cast_or_without_compression_the_fastest_is_taken():
    network = Network(2, 10.0, 0.1)
    assert choose(WORK, network, [VGC, POWERSGD]).words.endswith("it is the fastest of 2")
    assert choose(WORK, network, [DENSE, BF16]).chosen == "bf16"
    assert choose(WORK, network, [DENSE]).words == "dense: on this link (10 Mbit/s, 2 workers) it is the only one given"
    with pytest.raises(ValueError, match="no method"):
        choose(WORK, network, [])


def test_what_was_measured_corrects_a_prediction():
    network = Network(4, 100.0, 0.1)
    plain, corrected = choose(WORK, network, ALL), choose(WORK, network, ALL, errors={"vgc": 100.0, "other": 5.0})
    assert corrected.predictions["vgc"].step_ms == 100 * plain.predictions["vgc"].step_ms
    assert corrected.predictions["dense"] == plain.predictions["dense"]
    assert corrected.chosen == "powersgd"


def test_the_break_even_is_where_both_take_as_long():
    network = Network(4, 1.0, 0.01)
    mbit = pays_below(WORK, network, VGC, BF16)
    assert mbit is not None
    below, above = (choose(WORK, replace(network, mbit=factor * mbit), [BF16, VGC], 0.0) for factor in (0.99, 1.01))
    assert (below.chosen, above.chosen) == ("vgc", "bf16")
    assert pays_below(WORK, network, DENSE, BF16) is None or pays_below(WORK, network, DENSE, BF16) < 1
    assert pays_below(WORK, network, replace(BF16, bytes_per_element=1.0, encode_ns=0.0), BF16) == math.inf
    assert pays_below(WORK, network, replace(VGC, bytes_per_element=40.0, room=False), BF16) is None
