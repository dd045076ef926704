"""Compressors by name."""

import pytest

from gradwire import BF16, VGC, Dense, from_spec


@pytest.mark.parametrize(
    ("spec", "compressor"),
    [
        ("dense", Dense()),
        ("BF16", BF16()),
        ("vgc", VGC()),
        ("vgc:alpha=2", VGC(alpha=2.0)),
        (" vgc: alpha=1, tau=0.01 ", VGC(alpha=1.0, tau=0.01)),
        ("vgc:feedback=true,rounding=unbiased,tau=none", VGC(feedback=True, rounding="unbiased")),
    ],
)
def test_a_spec_names_a_compressor(spec, compressor):
    assert from_spec(spec) == compressor


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("vgcc:alpha=1", "known: dense, bf16, fp16, fp8, "),
        ("", "known: dense"),
        ("vgc:beta=1", "known: alpha, zeta, tau, floor, feedback, rounding"),
        ("vgc:alpha", "option=value"),
        ("dense:alpha=1", "it takes none"),
        ("vgc:alpha=much", "expected float"),
        ("vgc:alpha=1,alpha=2", "given twice"),
        ("vgc:feedback=perhaps", "expected bool"),
        ("vgc:alpha=-1", "alpha must be >= 0"),
        ("Strom", "Strom has no default for tau: write strom:tau=value"),
    ],
)
def test_a_wrong_spec_says_what_is_known(spec, text):
    with pytest.raises(ValueError, match=text):
        from_spec(spec)
