"""A plan by measurement, as one worker sees it: the link, the rehearsal, the verdict. All workers come to the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

from gradwire.methods import Compressor
from gradwire.plan.choose import choose
from gradwire.plan.probe import probe
from gradwire.tools.plan.rehearsal import Rehearsal
from gradwire.tools.plan.report import PlanReport
from gradwire.tools.progress import Bars
from gradwire.tools.train.settings import TrainingPlan
from gradwire.tools.train.worker_group import joined


def measured(
    plan: TrainingPlan, methods: Mapping[str, Compressor], margin: float, show: Callable[[PlanReport], None]
) -> None:
    """Join the others, measure, and show what follows from it on rank 0."""
    with joined(plan.settings.device) as group:
        with Bars(hidden=not group.leads, stderr=True, transient=True) as bars:
            tasks = {name: bars.begin(name, None) for name in ("link", "plain steps", "settling", "dry run", "laps")}
            assert dist.group.WORLD is not None
            network = probe(dist.group.WORLD, group.device)
            bars.update(tasks["link"], completed=1, total=1)
            rehearsal = Rehearsal(plan, group, lambda what, n, of: bars.update(tasks[what], completed=n, total=of))
            work, costs = rehearsal.rehearse(list(methods.items()), network)
        if group.leads:
            title = f"{plan.task.name} on {group.device.type}"
            show(PlanReport(title, work, network, costs, choose(work, network, costs, margin)))
        group.barrier()
