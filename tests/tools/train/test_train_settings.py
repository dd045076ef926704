"""Bad input is found before any process starts, and the message says what is known or what to do."""

import os
from pathlib import Path

import pytest

from gradwire.tools.cli.train_command import among_torchrun
from gradwire.tools.input_errors import InputError
from gradwire.tools.train.settings import Settings, check
from gradwire.tools.train.worker_group import choose_device, inside_torchrun


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(task="mnist"), r"unknown task 'mnist'. Known tasks: digits .*cifar10 .*text"),
        (Settings(compressor="zip"), r"--compressor zip: unknown compressor 'zip'; known: dense, bf16, "),
        (Settings(compressor="vgc:beta=1"), r"--compressor vgc:beta=1: .*beta.*alpha"),
        (Settings(compressor="vgc:alpha=x"), r"alpha.*'x'"),
        (Settings(compressor="vgc:alpha=-1"), r"alpha.*-1"),
        (
            Settings(optimizer="lion"),
            r"unknown optimizer 'lion'. Known optimizers: adam, adamw, plain, plain-adam, plain-adamw, sgd",
        ),
        (Settings(timeout=0), r"--timeout must be more than 0 seconds and at most 1e\+06, not 0"),
        (Settings(timeout=float("nan")), r"--timeout must be more than 0 seconds .*not nan"),
        (Settings(timeout=float("inf")), r"--timeout must be more than 0 seconds .*not inf"),
        (Settings(max_restarts=-1), r"--max-restarts must be 0 or more, not -1"),
        (Settings(workers=0), r"--workers must be 1 or more, not 0"),
        (Settings(workers=-3), r"--workers must be 1 or more, not -3"),
        (Settings(epochs=0), r"--epochs must be 1 or more"),
        (Settings(batch=0), r"--batch must be 1 or more"),
        (Settings(seed=-1), r"--seed must be 0 or more"),
        (Settings(save_every=-1), r"--save-every must be 0 or more"),
        (Settings(weight_decay=float("nan")), r"--weight-decay must be 0 or more, not nan"),
        (Settings(learning_rate=0.0), r"--learning-rate must be a positive number"),
        (Settings(device="tpu"), r"unknown device 'tpu'. Known devices: auto, cpu, cuda"),
        (Settings(resume=True, overwrite=True), r"give one of them"),
        (Settings(workers=90), r"90 workers x batch 16 take 1440 samples a step, the data has 1437"),
        (Settings(task="text", data=Path("/nowhere/x.txt")), r"/nowhere/x.txt is not a file"),
        (Settings(task="cifar10"), r"needs --data DIR"),
    ],
)
def test_bad_settings(settings: Settings, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(settings)


def test_defaults_are_the_tasks_and_the_folder_names_the_run() -> None:
    plan = check(Settings(compressor="vgc:alpha=1.5,zeta=0.99", seed=7))
    assert plan.out == Path("runs/digits-vgc-alpha=1.5-zeta=0.99-7")
    assert (plan.batch, plan.schedule.base, plan.weight_decay) == (16, 1e-3, 0.0)
    assert "alpha=1.5" in plan.identity()["compressor"]
    assert plan.identity() != check(Settings(compressor="vgc:alpha=1.5,zeta=0.99", seed=8)).identity()


def test_torchruns_number_of_workers_must_not_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "8")
    assert among_torchrun(Settings(workers=4), None).workers == 8
    assert among_torchrun(Settings(workers=8), 8).workers == 8
    with pytest.raises(InputError, match="--workers 4, but torchrun has started 8"):
        among_torchrun(Settings(workers=4), 4)


def test_inside_torchrun_needs_both_variables() -> None:
    assert inside_torchrun({"RANK": "0", "WORLD_SIZE": "1"})
    assert not inside_torchrun({"RANK": "0"})
    assert not inside_torchrun({})


def test_devices_are_shared_out_one_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert str(choose_device("auto", 1, 2)) == "cuda:1"
    assert str(choose_device("auto", 1, 3)) == "cpu", "not every worker gets one"
    assert str(choose_device("cpu", 0, 1)) == "cpu"
    with pytest.raises(InputError, match="3 workers on this machine need a GPU each, there are 2"):
        choose_device("cuda", 0, 3)


def test_a_budget_below_the_least_message_is_refused_before_anything_starts():
    with pytest.raises(InputError, match=r"max_bytes_per_step=10 is too little .* at least 160 bytes"):
        check(Settings(compressor="vgc:max_bytes_per_step=10"))
    check(Settings(compressor="vgc:max_bytes_per_step=160"))
