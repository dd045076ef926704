"""A time in the unit that one would say."""

from __future__ import annotations


def duration(ms: float) -> str:
    """18.8 ms, 59.1 s, 6.2 min, 2.07 h: three digits or so, in the unit that one would say."""
    units = (("ms", 1.0, 1e4), ("s", 1e3, 120.0), ("min", 6e4, 120.0))
    number, unit = next(((ms / one, name) for name, one, most in units if ms / one < most), (ms / 3.6e6, "h"))
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
