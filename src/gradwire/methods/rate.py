"""A rate as a user writes it: "50Mbit/s"."""

from __future__ import annotations

import re

UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "kB": 1e3, "MB": 1e6, "GB": 1e9}  # in bytes
FASTEST = 1e15  # bytes a second: no link
EXAMPLES = "write 50Mbit/s, 1Gbit/s or 6.25MB/s"


def bytes_a_second(rate: str) -> float:
    """What a rate such as "50Mbit/s" or "6.25MB/s" comes to."""
    match = re.fullmatch(r"\s*([-+]?[0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)\s*([A-Za-z]+)(?:/s)?\s*", str(rate))
    unit = match and (match[2].lower() if match[2].lower().endswith("bit") else match[2])  # Mb may be either
    if match is None or unit not in UNITS:
        raise ValueError(f"{rate!r} is not a rate: {EXAMPLES}")
    found = float(match[1]) * UNITS[unit]
    if not 0 < found < FASTEST:
        raise ValueError(f"a rate of {rate} is not possible, it must be > 0 and less than a petabyte/s: {EXAMPLES}")
    return found
