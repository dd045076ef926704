"""`gradwire train` by local steps: scores of the base weights, resumed in mid-round bit for bit, restarted, refused."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from test_train_restarts import run_and_kill_a_worker
from test_train_resume import EPOCHS, latest, load_training, options, read_columns, run_and_kill

from gradwire.tools.input_errors import InputError
from gradwire.tools.train import tasks
from gradwire.tools.train.local_options import LocalOptions
from gradwire.tools.train.settings import Settings, check

# an epoch of two workers has 44 steps and every 8th is saved: rounds of 10 in two parts end at neither
LATE = "vgc:alpha=0,density=0.03,every=10,fragments=2,delay=3"
COLUMNS = ("epoch", "step", "train_loss", "test_accuracy", "bytes_sent", "dense_bytes", "ratio")


def local(**given: Any) -> Settings:
    compressor = given.pop("compressor", "vgc:alpha=0,density=0.03")
    return Settings(compressor=compressor, local=LocalOptions(**given))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (local(outer_lr=0.5), "--outer-lr is of local steps: give --every H too"),
        (local(every=0), "--every 0: every must be a whole number of at least 1"),
        (local(every=5, outer_lr=-1.0), "--outer-lr -1.0: outer_lr must be"),
        (local(every=5, outer_momentum=1.0), r"--outer-momentum 1.0: outer_momentum must be in \[0, 1\)"),
        (local(every=5, decay=2.0), r"--decay 2.0: decay must be in \[0, 1\]"),
        (local(every=5, delay=5), r"--delay 5: delay \(5\) must be less than every \(5\)"),
        (local(compressor="streaming_diloco", every=3), r"--every 3: delay \(5\) must be less than every \(3\)"),
        (local(every=5, fragments=9), "--fragments 9: .* the model has 3 layers"),
        (local(compressor="diloco:foo=1"), "--compressor diloco:foo=1: diloco has no option 'foo=1'"),
        (local(compressor="zip:every=3"), "--compressor zip:every=3: unknown compressor 'zip'"),
        (local(compressor="vgc", every=5), "--compressor vgc: local steps .* no second moments .* alpha=0"),
        (
            local(compressor="vgc:alpha=0,max_bytes_per_step=20", every=3),
            "max_bytes_per_step=20 allows an exchange 60 bytes",
        ),
    ],
)
def test_what_local_steps_refuse_names_the_option(settings: Settings, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(settings)


def test_a_run_is_the_same_however_its_recipe_is_written() -> None:
    by_option = check(local(every=5, delay=2))
    by_spec = check(local(compressor="vgc:alpha=0,density=0.03,every=5,delay=2"))
    assert by_option.identity() == by_spec.identity()
    assert by_option.out == by_spec.out == Path("runs/digits-vgc-alpha=0-density=0.03-every=5-delay=2-0")
    assert by_option.identity() != check(local(every=5)).identity()
    assert check(local(compressor="diloco:every=9", every=7)).recipe == check(local(compressor="diloco:every=7")).recipe
    assert check(Settings(compressor="bf16")).recipe is None


def test_a_methods_own_momentum_does_not_take_that_of_the_inner_optimizer() -> None:
    assert check(Settings(compressor="topk:momentum=0.9")).own_momentum == 0.9
    assert check(Settings(compressor="topk:momentum=0.9", local=LocalOptions(every=3))).own_momentum == 0


def run(out: Path, *arguments: str) -> list[dict[str, str]]:
    result = run_command("train", "--task", "digits", "--workers", "2", "--out", str(out), *arguments)
    assert result.returncode == 0, result.stderr
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_scores_are_of_the_base_weights_and_the_last_after_a_last_round(tmp_path: Path) -> None:
    """In a round that is longer than the training the base weights do not move until its end."""
    out = tmp_path / "out"
    rows = run(out, "--compressor", "bf16", "--every", "1000", "--epochs", "3")
    task = tasks.find("digits").open(None)
    torch.manual_seed(0)
    untrained = accuracy(task, task.make_model())
    assert [float(row["test_accuracy"]) for row in rows[:2]] == pytest.approx([untrained] * 2)
    assert [row["bytes_sent"] for row in rows[:2]] == ["0", "0"]
    assert float(rows[2]["test_accuracy"]) > 0.8 > untrained
    assert float(rows[2]["train_loss"]) < float(rows[0]["train_loss"])
    # the last round: 2 bytes an element and three numbers of four
    assert int(rows[2]["bytes_sent"]) == 2 * 85_002 + 12
    model = task.make_model()
    model.load_state_dict(load_training(out)["model"])
    assert accuracy(task, model) == pytest.approx(float(rows[2]["test_accuracy"]))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["compressor"].startswith("Recipe(method=BF16(")


def accuracy(task: Any, model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(task.score(task.evaluate(model.eval()))["test_accuracy"])


def own_files(out: Path) -> list[dict[str, Any]]:
    folder = latest(out)
    assert folder is not None
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("worker-*.pt"))]


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def assert_same_run(whole: Path, broken: Path) -> None:
    one, other = load_training(whole), load_training(broken)
    assert_same({name: one[name] for name in ("model", "generators")}, {n: other[n] for n in ("model", "generators")})
    assert_same(dict(enumerate(own_files(whole))), dict(enumerate(own_files(broken))))
    assert read_columns(whole, COLUMNS) == read_columns(broken, COLUMNS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "out"
    result = run_command(*options(LATE, out))
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed in the middle of a round. Copy it before use."""
    out = tmp_path_factory.mktemp("killed") / "out"
    run_and_kill(options(LATE, out), out)
    return out


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_middle_of_a_round(whole: Path, killed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(killed, broken)
    first, second = own_files(broken)  # each worker's own: one file for all would not do
    moments = [content["optimizer"]["state"][0]["exp_avg"] for content in (first, second)]
    assert not torch.equal(*moments)
    result = run_command(*options(LATE, broken), "--resume")
    assert result.returncode == 0, result.stderr
    assert "going on after epoch" in result.stdout
    assert_same_run(whole, broken)


@pytest.mark.slow
def test_another_number_of_workers_goes_on(killed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed, out)
    result = run_command(*options(LATE, out, workers=3), "--resume")
    assert result.returncode == 0, result.stderr
    assert "the state of 2 workers is carried over to 3" in result.stdout
    rows = read_columns(out, ("epoch", "workers", "test_accuracy"))
    assert [row[0] for row in rows] == [str(epoch) for epoch in range(1, EPOCHS + 1)]
    assert rows[-1][1] == "3"
    assert float(rows[-1][2]) > 0.85
    assert len(own_files(out)) == 3


@pytest.mark.slow
def test_another_recipe_and_a_changed_file_of_a_worker_are_refused(killed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed, out)
    result = run_command(*options(LATE.replace("every=10", "every=11"), out), "--resume")
    assert result.returncode == 2
    assert "holds another run: compressor is" in result.stderr
    folder = latest(out)
    assert folder is not None
    path = folder / "worker-00001.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    result = run_command(*options(LATE, out), "--resume")
    assert result.returncode == 2
    assert "worker-00001.pt is not what was written" in result.stderr


@pytest.mark.slow
def test_a_run_outlives_a_worker(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def ready() -> bool:
        now = latest(out)
        return now is not None and now.name > "epoch-00001-step-00000048"

    arguments = ["-m", "gradwire", *options(LATE, out), "--max-restarts", "1"]
    assert "going on after epoch" in run_and_kill_a_worker(arguments, ready)
    assert_same_run(whole, out)
