"""A budget's options: rates in words, what is refused before anything is sent, the command line."""

from __future__ import annotations

import pytest

import gradwire
import scenes
from budgeted import wide
from gradwire import VGC, from_spec
from gradwire.errors import AttachError
from gradwire.methods import to_spec
from gradwire.methods.rate import bytes_a_second
from gradwire.tools.train.settings import make_compressor


@pytest.mark.parametrize(
    ("rate", "n_bytes"),
    [
        ("50Mbit/s", 6.25e6),
        ("50Mbit", 6.25e6),
        (" 50 mbit/s ", 6.25e6),
        ("6.25MB/s", 6.25e6),
        ("1Gbit/s", 1.25e8),
        (".8kbit/s", 100),
        ("3kB", 3000),
        ("1e3 kbit/s", 125_000),
    ],
)
def test_rates(rate, n_bytes):
    assert bytes_a_second(rate) == n_bytes
    compressor = from_spec(f"vgc:alpha=0.5,budget={rate}")
    assert compressor == VGC(alpha=0.5, budget=rate.strip())
    assert from_spec(to_spec(compressor)) == compressor


@pytest.mark.parametrize(
    "rate", ["", "fast", "50", "50Mb/s", "50mb", "50Mbit/h", "50 bit", "Mbit/s", "1e400GB", "1e9GB", "nanMB"]
)
def test_what_is_no_rate(rate):
    with pytest.raises(ValueError, match=r"VGC: budget: .*write 50Mbit/s, 1Gbit/s or 6.25MB/s"):
        VGC(budget=rate)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "0Mbit/s"}, "must be > 0"),
        ({"budget": "-5Mbit/s"}, "must be > 0"),
        ({"max_bytes_per_step": 0}, "whole number > 0, got 0"),
        ({"max_bytes_per_step": -7}, "whole number > 0"),
        ({"max_bytes_per_step": 1e4}, "whole number > 0, got 10000.0"),
        ({"max_bytes_per_step": True}, "whole number > 0"),
        (
            {"budget": "5Mbit", "max_bytes_per_step": 5},
            r"budget \(5Mbit\) and max_bytes_per_step \(5\) exclude each other",
        ),
        ({"budget": "5Mbit", "tau": 0.1}, r"tau \(0.1\) and budget \(5Mbit\) exclude"),
        ({"max_bytes_per_step": 5, "tau": 0.1}, "exclude each other"),
        ({"max_bytes_per_step": 5, "density": 0.1}, r"density \(0.1\) and max_bytes_per_step \(5\) exclude"),
        ({"budget": "5Mbit", "density": 0.1}, "exclude each other"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        VGC(**options)


def test_on_the_command_line():
    assert make_compressor("vgc:max_bytes_per_step=50000") == VGC(max_bytes_per_step=50_000)
    assert make_compressor("vgc:alpha=0,budget=50Mbit/s") == VGC(alpha=0.0, budget="50Mbit/s")
    with pytest.raises(Exception, match="--compressor vgc:budget=50: VGC: budget: '50' is not a rate"):
        make_compressor("vgc:budget=50")


def refused() -> tuple[list[str], int, list[str], str]:
    model = scenes.ddp(wide())
    texts = []
    with pytest.raises(AttachError) as first:
        gradwire.attach(model, VGC(max_bytes_per_step=200))
    texts.append(str(first.value))
    wire = gradwire.attach(model, VGC(alpha=1.0))
    with pytest.raises(AttachError) as second:
        wire.compressor = VGC(max_bytes_per_step=200)
    texts.append(str(second.value))
    prints = list(scenes.train(model, range(3), scenes.sgd(model)))
    return texts, wire._reducer.capacity.least(VGC().words), prints, repr(wire.compressor)


def test_a_budget_that_no_step_can_keep_is_refused(spawn):
    results = spawn(2, refused)
    for texts, least, prints, compressor in results:
        wanted = f"max_bytes_per_step=200 is too little for this model: a step needs at least {least} bytes"
        assert all(text.startswith(wanted) for text in texts)
        assert 200 < least < 1000
        assert prints == results[0][2]
        assert compressor == repr(VGC(alpha=1.0))
