"""All runs of a race, one after another, each in a lab of its own: those that are done are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from gradwire.tools.lab.commands import CommandError
from gradwire.tools.provenance import provenance
from gradwire.tools.race import events
from gradwire.tools.race.contest import RaceRun
from gradwire.tools.race.events import Event
from gradwire.tools.race.race_files import RaceFiles
from gradwire.tools.race.race_table import RaceTable

HOST = "gradwire.tools.race.contestant"


def race(
    runs: Sequence[RaceRun], files: RaceFiles, watcher: RaceTable, loopback: bool = False, command: str = ""
) -> list[str]:
    """Run what is not done yet; returns what went wrong with those that failed, and goes on after them."""
    failures, origin = [], provenance("cpu", command)
    for run in runs:
        if (row := files.find(run)) is not None:
            watcher.show(run, row["state"], row)
            continue
        try:
            race_one(run, files, watcher, loopback, origin)
        except CommandError as error:
            failures.append(f"{run.method} at {run.rate}: {error}")
            watcher.show(run, "failed")
    return failures


def race_one(run: RaceRun, files: RaceFiles, watcher: RaceTable, loopback: bool, origin: dict[str, str]) -> None:
    """One run, from the start of its hosts to its row."""
    last: Event = {}

    def tell(standing: Event) -> None:
        last.update(standing)
        files.test(run, standing)
        if not standing["state"]:
            watcher.show(run, "running", standing)

    files.begin(run)
    watcher.show(run, "running")
    with events.open_hosts(run.hosts, run.rate, loopback) as hosts:
        events.watch(hosts, HOST, asdict(run), tell)
    if not last.get("state"):
        raise CommandError("its hosts ended without a word of how", 1)
    row = files.end(run, last, origin)
    watcher.show(run, row["state"], row)
