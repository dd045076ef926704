"""The demo: the same training once for each method, in the same processes, and one table of what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from gradwire.state.durable_files import write_atomic
from gradwire.tools.input_errors import InputError
from gradwire.tools.provenance import provenance
from gradwire.tools.result_files import csv_text
from gradwire.tools.train.loop import Trainer
from gradwire.tools.train.reporter import Reporter
from gradwire.tools.train.settings import Settings, TrainingPlan, check
from gradwire.tools.train.worker_group import joined

METHODS = {
    "Dense (float32)": "dense",
    "BF16": "bf16",
    "VGC alpha=1": "vgc:alpha=1",
    "VGC alpha=1.5": "vgc:alpha=1.5",
}

Record = dict[str, str]  # a row of the CSV; the table is made of these too, so that both say the same


def plans(workers: int, epochs: int | None, seed: int) -> dict[str, TrainingPlan]:
    """One plan a method, alike in everything else."""
    return {
        name: check(Settings(task="digits", compressor=spec, workers=workers, epochs=epochs, seed=seed, device="cpu"))
        for name, spec in METHODS.items()
    }


def check_csv(path: Path | None) -> None:
    """Raise if the results could not be written there; found out before the training, not after it."""
    if path is not None and path.is_dir():
        raise InputError(f"--csv {path} is a folder, a file was expected")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"--csv {path}: there is no folder {path.parent}; make it first")


def run_demo(methods: dict[str, TrainingPlan], csv_path: Path | None = None) -> None:
    """One worker of the demo; rank 0 prints the table and writes the CSV."""
    with joined("cpu") as group:
        reporter = Reporter(group.rank, every_epoch=False)
        records = []
        for name, plan in methods.items():
            trainer = Trainer(plan, group, reporter)
            trainer.run()
            records.append({"method": name, **describe(trainer)})
            trainer.wire.detach()
        reporter.end()
        if group.leads:
            Console().print(table(records))
            if csv_path is not None:
                rows = [{**record, **provenance()} for record in records]
                write_atomic(csv_path, csv_text(list(rows[0]), rows))


def describe(trainer: Trainer) -> Record:
    """A finished training: test accuracy of the last epoch, traffic of rank 0, time of a step, settings."""
    plan, state = trainer.plan, trainer.state
    last, total = state.rows[-1], state.total
    figures = {
        "accuracy": last["test_accuracy"],
        "bytes_sent": total.bytes_sent,
        "times_less": total.dense_bytes / total.bytes_sent,
        "times_less_last_epoch": last["dense_bytes"] / last["bytes_sent"],
        "ratio": total.per_step(trainer.parameters)["ratio"],
        "ms_per_step": median(row["ms_per_step"] for row in state.rows),  # the first epoch may compile kernels
        "parameters": trainer.parameters,
        "workers": trainer.group.world,
        "batch": plan.batch,
        "epochs": plan.epochs,
        "seed": plan.settings.seed,
    }
    return {key: str(value) if isinstance(value, int) else f"{value:.6g}" for key, value in figures.items()}


def table(records: Sequence[Record]) -> Table:
    """One row a method."""
    names = ("parameters", "workers", "batch", "epochs")
    parameters, workers, batch, epochs = (int(records[0][name]) for name in names)
    shown = Table(
        title=f"digits, {parameters:,} parameters, {workers} workers x {batch}, {epochs} epochs of Adam",
        caption="MB: handed to the collective by one worker, headers and padding included; VGC's messages are gathered "
        f"and not summed, so on the link its saving is 2/W of that ({2 / workers:.2g} here). ratio: parameters / "
        "elements one worker sends a step. ms/step: of the median epoch, on this machine alone, without a slow link.",
    )
    shown.add_column("method")
    for heading in ("test accuracy", "MB sent", "times less", "ratio", "ms/step"):
        shown.add_column(heading, justify="right")
    for record in records:
        shown.add_row(
            record["method"],
            f"{100 * float(record['accuracy']):.2f} %",
            f"{int(record['bytes_sent']) / 1e6:.2f}",
            f"{float(record['times_less']):.1f} x",
            f"{float(record['ratio']):.1f}",
            f"{float(record['ms_per_step']):.1f}",
        )
    return shown
