"""Two processes with nothing between them: what "auto" costs where nothing can be won."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from benchmarks.auto_links import Hosts, Row
from gradwire.tools.lab.hosts import Hosts as Machines

ROUNDS, BATCH = 2050, 256  # medians of 400 steps are a percent apart, of the same thing


def rows() -> Iterator[Row]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with Machines(2) as machines:
        hosts = Hosts(machines, free)
        answers = hosts.order("compare", rounds=ROUNDS, batch=BATCH)
    found = {name: max(answer[name] for answer in answers) for name in ("auto", "control", "plain")}
    against = {
        "auto": f"plain DDP ({answers[0]['method']}, forwards swapped: {answers[0]['swapped']})",
        "control": "itself",
    }
    for name, bar in (("auto", {"bar": 1.03, "holds": found["auto"] <= 1.03 * found["plain"]}), ("control", {})):
        what = f"a step over loopback, MLP of 0.5 M, B {BATCH}, median of {answers[0]['steps']}: {name}"
        yield {"what": what, "against": against[name], "time_ms": found[name], "reference_ms": found["plain"]} | bar
