"""The rates of a lab's links: what a user may write, and the token bucket that tc makes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.tools.input_errors import InputError

MOST_HOSTS = 250
UNLIMITED = "unlimited"
UNITS = {"": 1.0, "kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}  # in Mbit/s
SLOWEST, FASTEST = 1.0, 100_000.0  # Mbit/s; beyond it no machine fills a link by software
EXAMPLES = f"write 100 (Mbit/s), 10Mbit, 1Gbit, {UNLIMITED}, or 100/20 for up and down"

PACKET = 1514  # bytes: 1500 and the Ethernet header
# What passes at once after a pause is not shaped, so the bucket is small: 1 ms of the rate, and not under two packets
# (with one, 10 Mbit/s became 8 when three hosts sent to one). TCP's 64 KB packets that do not fit are cut up by tbf,
# which keeps a core busy at a few hundred Mbit/s: where 2 ms are enough for them the bucket has room for one.
BURST_S, LEAST_BURST = 1e-3, 2 * PACKET
WHOLE_PACKET, WHOLE_S = 69_000, 2e-3  # 64 KB and the headers of the packets it stands for
# A packet that finds the queue full is lost. With 20 ms (32 KB at the least) TCP reached, in both directions at once
# and with 4 hosts in a ring, 95 % of what framing and acknowledgements leave at 1 Mbit/s, 97 % at 10, 98 % at 100 and
# 1000 (Reno, 2 cores). With 64 KB at 1 Mbit/s it was 90 %: acknowledgements wait behind the data for half a second.
QUEUE_S, LEAST_QUEUE = 20e-3, 32_000


@dataclass(frozen=True)
class Link:
    """One host's link: Mbit/s it can send and receive at; None has no limit."""

    up: float | None
    down: float | None

    def __str__(self) -> str:
        return _words(self.up) if self.up == self.down else f"{_words(self.up)} up, {_words(self.down)} down"


Rate = str | float | Link
Rates = Rate | Sequence[Rate]


def parse_links(rates: Rates, hosts: int) -> list[Link]:
    """One link a host, from one rate for all or one for each ("100,10" or a list)."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise InputError(f"{hosts} hosts: from 1 to {MOST_HOSTS} are possible")
    if isinstance(rates, str):
        rates = rates.split(",")
    elif not isinstance(rates, Sequence):
        rates = [rates]
    links = [parse_link(rate) for rate in rates]
    if len(links) == 1:
        return links * hosts
    if len(links) != hosts:
        raise InputError(f"{len(links)} rates for {hosts} hosts: give one for all, or one for each")
    return links


def parse_link(rate: Rate) -> Link:
    """ "100": both ways; "100/20": 100 Mbit/s up, 20 down."""
    if isinstance(rate, Link):
        return rate
    if not isinstance(rate, str) or "/" not in rate:
        both = parse_rate(rate)
        return Link(both, both)
    up, _, down = rate.partition("/")
    return Link(parse_rate(up), parse_rate(down))


def parse_rate(rate: str | float) -> float | None:
    """Mbit/s, or None for no limit."""
    text = str(rate).strip().lower()
    if text == UNLIMITED:
        return None
    match = re.fullmatch(r"(-?[0-9]*\.?[0-9]+(?:e[0-9]+)?) *([a-z]*)", text)
    if match is None or match[2] not in UNITS:
        raise InputError(f"{rate!r} is not a rate: {EXAMPLES}")
    mbit = float(match[1]) * UNITS[match[2]]
    if not math.isfinite(mbit) or not SLOWEST <= mbit <= FASTEST:
        raise InputError(f"a rate of {rate} is not possible: from {SLOWEST:g} Mbit/s to {FASTEST:g}; {EXAMPLES}")
    return mbit


def token_bucket(mbit: float) -> list[str]:
    """tc's words for a link of this rate. tbf counts the header of every packet, also inside TCP's packets of 64 KB."""
    n_bytes = mbit * 1e6 / 8  # a second
    least = WHOLE_PACKET if n_bytes * WHOLE_S >= WHOLE_PACKET else LEAST_BURST
    burst = max(least, round(n_bytes * BURST_S))
    queue = max(LEAST_QUEUE, round(n_bytes * QUEUE_S))
    return ["tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "limit", str(queue)]


def _words(mbit: float | None) -> str:
    return UNLIMITED if mbit is None else f"{mbit:g} Mbit/s"
