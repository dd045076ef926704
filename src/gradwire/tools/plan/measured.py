"""A plan by measurement, as one worker sees it: the link, the rehearsal, the verdict. All workers come to the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from gradwire.methods import Compressor
from gradwire.plan.choose import choose
from gradwire.plan.probe import probe
from gradwire.tools.plan.rehearsal import Rehearsal
from gradwire.tools.plan.report import Report
from gradwire.tools.train.settings import Plan
from gradwire.tools.train.team import joined


def measured(plan: Plan, methods: Mapping[str, Compressor], margin: float, show: Callable[[Report], None]) -> None:
    """Join the others, measure, and show what follows from it on rank 0."""
    with joined(plan.device) as team:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        hidden = not (team.leads and console.is_terminal)
        with Bars(*columns, console=console, transient=True, disable=hidden) as bars:
            tasks = {
                name: bars.add_task(name, total=None) for name in ("link", "plain steps", "settling", "dry run", "laps")
            }
            assert dist.group.WORLD is not None
            network = probe(dist.group.WORLD, team.device)
            bars.update(tasks["link"], completed=1, total=1)
            rehearsal = Rehearsal(plan, team, lambda what, n, of: bars.update(tasks[what], completed=n, total=of))
            work, costs = rehearsal.rehearse(list(methods.items()), network)
        if team.leads:
            title = f"{plan.task.name} on {team.device.type}"
            show(Report(title, work, network, costs, choose(work, network, costs, margin)))
        team.barrier()
