"""The demo: the same training once for each method, in the same processes, and one table of what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gradwire.train.loop import Trainer
from gradwire.train.metrics import Traffic
from gradwire.train.progress import make_reporter
from gradwire.train.settings import Plan, Settings, check
from gradwire.train.team import joined

METHODS = {
    "Dense (float32)": "dense",
    "BF16": "bf16",
    "VGC alpha=1": "vgc:alpha=1",
    "VGC alpha=1.5": "vgc:alpha=1.5",
}


@dataclass(frozen=True)
class Outcome:
    """What one method came to: test accuracy of the last epoch, traffic of rank 0, mean time of a step."""

    accuracy: float
    traffic: Traffic
    ratio: float
    step_ms: float


def plans(workers: int, epochs: int | None, seed: int) -> dict[str, Plan]:
    """One plan a method, alike in everything else."""
    return {
        name: check(Settings(task="digits", compressor=spec, workers=workers, epochs=epochs, seed=seed, device="cpu"))
        for name, spec in METHODS.items()
    }


def run_demo(methods: dict[str, Plan]) -> None:
    """One worker of the demo; rank 0 prints the table."""
    with joined("cpu") as team:
        reporter = make_reporter(team.rank, every_epoch=False)
        outcomes = {}
        for name, plan in methods.items():
            trainer = Trainer(plan, team, reporter)
            trainer.run()
            outcomes[name] = outcome(trainer)
            trainer.wire.detach()
        reporter.end()
        if team.leads:
            print_table(next(iter(methods.values())), trainer.parameters, outcomes)


def outcome(trainer: Trainer) -> Outcome:
    """The outcome of a finished training."""
    standing = trainer.standing
    return Outcome(
        accuracy=standing.rows[-1]["test_accuracy"],
        traffic=standing.total,
        ratio=standing.total.per_step(trainer.parameters)["ratio"],
        step_ms=1000 * sum(row["seconds"] for row in standing.rows) / standing.step,
    )


def print_table(plan: Plan, parameters: int, outcomes: dict[str, Outcome]) -> None:
    """One row a method."""
    table = Table(
        title=f"digits, {parameters:,} parameters, {plan.workers} workers x {plan.batch}, {plan.epochs} epochs of Adam",
        caption="MB: handed to the collective by one worker, headers and padding included; VGC's messages are gathered "
        f"and not summed, so on the link its saving is 2/W of that ({2 / plan.workers:.2g} here). ratio: parameters / "
        "elements one worker sends a step. ms/step: on this machine alone, without a slow link.",
    )
    table.add_column("method")
    for heading in ("test accuracy", "MB sent", "times less", "ratio", "ms/step"):
        table.add_column(heading, justify="right")
    for name, result in outcomes.items():
        less = result.traffic.dense_bytes / result.traffic.bytes_sent
        table.add_row(
            name,
            f"{100 * result.accuracy:.2f} %",
            f"{result.traffic.bytes_sent / 1e6:.2f}",
            f"{less:.1f} x",
            f"{result.ratio:.1f}",
            f"{result.step_ms:.1f}",
        )
    Console().print(table)
