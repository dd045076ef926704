"""Where a worker process begins: join the others, train, and leave an error where the launcher finds it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from gradwire.state.durable_files import write_atomic
from gradwire.tools.input_errors import USERS
from gradwire.tools.result_files import json_text
from gradwire.tools.train import metrics, run_checkpoint, run_directory
from gradwire.tools.train.loop import Trainer
from gradwire.tools.train.reporter import Reporter
from gradwire.tools.train.settings import TrainingPlan
from gradwire.tools.train.worker_group import LAUNCHER, joined, restarts

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
WATCH_SECONDS = 0.5


def train(plan: TrainingPlan) -> None:
    """One worker's whole run, from the checkpoint if there is one to the last epoch."""
    with ExitStack() as stack:
        group = stack.enter_context(joined(plan.settings.device, plan.settings.timeout))
        # the agent of the machine that failed counts it, others may not
        restarted = bool(group.gather(torch.tensor(restarts())).any())
        found: run_directory.Checkpoint | None = None
        if group.leads:
            identity = plan.identity()
            found = run_directory.inspect(plan.out, identity, plan.settings.resume, plan.settings.overwrite, restarted)
            stack.enter_context(run_directory.locked(plan.out))
            run_directory.begin(plan.out, identity, found)
        epoch, step = group.tell(*((found.epoch, found.step) if found else (-1, -1)))
        reporter = Reporter(group.rank)
        stack.callback(reporter.end)
        trainer = Trainer(plan, group, reporter)
        if step >= 0:
            run_checkpoint.restore(trainer, run_directory.checkpoint_path(plan.out, epoch, step))
        if found:
            reporter.note(run_checkpoint.describe(found, group.world))
        trainer.run(partial(keep, trainer))
        trainer.wire.detach()


def keep(trainer: Trainer) -> None:
    """All ranks: save, and write the results so far."""
    plan, group, state = trainer.plan, trainer.group, trainer.state
    run_checkpoint.save(trainer, plan.out)
    if group.leads:
        metrics.write_csv(plan.out / run_directory.METRICS, state.rows, plan.task.scores)
        summary = metrics.summarise(plan, trainer.parameters, str(group.device), state)
        write_atomic(plan.out / run_directory.SUMMARY, json_text(summary))


def die_with_launcher() -> None:
    """End this process soon after its parent, even inside a collective: torchrun's workers survive a killed torchrun.

    They would go on writing into the folder that the user resumes from. The launcher says who it is, because it may be
    gone before anybody looks; torchrun does not.
    """
    parent = int(os.environ.pop(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="gradwire-launcher-watch", daemon=True).start()


def run_reporting_errors(body: Callable[[], None]) -> None:
    """Run a worker's body. An error goes to the file torchrun gave, and once to the screen by the launcher.

    The process ends by os._exit: Python's own teardown waits for threads that may hang in a collective, and with four
    DDP models behind it one of 13 runs aborted there ("terminate called without an active exception", torch 2.13).
    """
    die_with_launcher()
    try:
        body()
    except USERS as error:
        report(f"error: {error}", f"error: {error}")
        leave(2)
    except Exception as error:
        report(f"{type(error).__name__}: {error}", traceback.format_exc())
        leave(1)
    leave(0)


def report(text: str, stack: str) -> None:
    """Leave an error where the launcher looks for it; where there is none, say it."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        print(f"gradwire: {stack}", file=sys.stderr)
        return
    extra = {"py_callstack": stack, "timestamp": str(int(time.time())), "time": time.time()}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def leave(code: int) -> None:
    """End this process without teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
