"""The file of an experiment: what it names, and what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gradwire import Dense, TopK
from gradwire.local_steps.recipe import Recipe, recipe_of
from gradwire.tools.experiment.experiment_file import Course, from_table, open_task, read
from gradwire.tools.input_errors import InputError

GOOD: dict[str, Any] = {"task": "digits", "methods": ["dense", "vgc:alpha=1"], "epochs": 4}
COMMITTED = sorted((Path(__file__).parents[3] / "experiments").glob("*.toml"))


def test_runs_are_all_combinations_seed_by_seed() -> None:
    table = GOOD | {"seeds": [0, 1], "optimizers": ["sgd", "adam"], "rates": [0.4, 1]}
    runs = from_table(table).runs
    assert len(runs) == 16 == len({run.name for run in runs})
    assert [run.seed for run in runs] == [0] * 8 + [1] * 8
    assert runs[0].name == "sgd-dense-x0.4-seed0"
    assert runs[-1].name == "adam-vgc-alpha-1-seed1"


def test_a_density_that_falls_keeps_its_mean() -> None:
    table = GOOD | {"methods": ["dense", "topk:density=0.01"], "fronts": [0, 3]}
    runs = from_table(table).runs
    assert [run.name for run in runs] == [
        "sgd-dense-seed0",
        "sgd-topk-density-0.01-seed0",
        "sgd-topk-density-0.01-front3-seed0",
    ]
    assert runs[1].compressor(0.7) == TopK(density=0.01)
    densities = [runs[2].compressor((number + 0.5) / 1000).density for number in range(1000)]
    assert sum(densities) / 1000 == pytest.approx(0.01, rel=1e-3)
    assert densities[0] / densities[-1] == pytest.approx(math.exp(3), rel=1e-2)


def test_more_runs_of_some_methods() -> None:
    also = [{"methods": ["vgc:alpha=1"], "seeds": [0, 2]}, {"methods": ["bf16"], "rates": [2], "optimizers": ["adam"]}]
    runs = from_table(GOOD | {"optimizers": ["sgd", "adam"], "also": also}).runs
    names = [
        "sgd-dense",
        "sgd-vgc-alpha-1",
        "adam-dense",
        "adam-vgc-alpha-1",
        "adam-bf16-x2",
    ]  # seed 0 of VGC is one run
    assert [run.name for run in runs] == [
        *(f"{name}-seed0" for name in names),
        "sgd-vgc-alpha-1-seed2",
        "adam-vgc-alpha-1-seed2",
    ]


def test_more_runs_with_an_optimizer_of_their_own() -> None:
    also = [{"methods": ["dense"], "optimizers": ["plain"]}]
    experiment = from_table(GOOD | {"optimizers": ["sgd"], "also": also, "learning_rate": {"plain": 2.0}})
    assert [run.name for run in experiment.runs] == ["sgd-dense-seed0", "sgd-vgc-alpha-1-seed0", "plain-dense-seed0"]
    assert experiment.rate_at(experiment.runs[-1], 0.5) == 2.0


def test_local_steps_are_an_axis_and_have_names_of_their_own() -> None:
    also = [
        {"methods": ["diloco:every=20", "diloco"], "outer_lr": 0.5},
        {"methods": ["dense"], "every": [8], "delay": 2, "fragments": 2, "rates": [2]},
    ]
    table = GOOD | {"methods": ["dense", "topk:density=0.1"], "every": [0, 1, 30], "decay": 0.5, "also": also}
    runs = from_table(table).runs
    assert [run.name for run in runs] == [
        "sgd-dense-seed0",
        "sgd-topk-density-0.1-seed0",
        "sgd-dense-H1-decay-0.5-seed0",
        "sgd-topk-density-0.1-H1-decay-0.5-seed0",
        "sgd-dense-H30-decay-0.5-seed0",
        "sgd-topk-density-0.1-H30-decay-0.5-seed0",
        "sgd-diloco-every-20-outer_lr-0.5-decay-0.5-seed0",
        "sgd-diloco-outer_lr-0.5-decay-0.5-seed0",
        "sgd-dense-H8-decay-0.5-fragments-2-delay-2-x2-seed0",
    ]
    assert [run.is_local for run in runs] == [False] * 2 + [True] * 7
    assert runs[5].recipe() == Recipe(TopK(density=0.1), 30, decay=0.5)
    assert runs[6].recipe() == recipe_of("diloco", every=20, outer_lr=0.5, decay=0.5)
    assert runs[8].recipe() == Recipe(Dense(), 8, decay=0.5, fragments=2, delay=2)
    assert runs[5].label == "topk:density=0.1 every=30 decay=0.5"
    assert runs[1].label == "topk:density=0.1"


def test_local_steps_with_a_density_that_falls() -> None:
    run = from_table(GOOD | {"methods": ["dense", "topk:density=0.01"], "fronts": [3], "every": [2]}).runs[0]
    assert run.name == "sgd-topk-density-0.01-front3-H2-seed0"
    assert run.recipe().compressor == run.compressor(0.0) == TopK(density=0.03157)
    assert run.compressor(1.0).share < 0.01


def test_learning_rates() -> None:
    table = {
        "task": "cifar10",
        "methods": ["dense"],
        "epochs": 300,
        "workers": 8,
        "optimizers": ["sgd", "adam"],
        "rates": [1.0, 2.0],
        "learning_rate": {"adam": 0.002},
        "schedule": {"sgd": {"kind": "halving", "times": 12}},
    }
    experiment = from_table(table)
    sgd, twice, adam, _ = experiment.runs
    assert [experiment.rate_at(sgd, epoch / 300) for epoch in (0, 24.99, 25, 299.9)] == [0.4, 0.4, 0.2, 0.4 / 2**11]
    assert experiment.rate_at(twice, 0.0) == 0.8
    assert experiment.rate_at(adam, 0.5) == 0.002


def test_the_same_schedule_in_fewer_epochs() -> None:
    course = Course("halving", times=12)
    for halving in range(12):
        assert course.at(halving / 12) == 0.5**halving
    cosine = Course("cosine", warmup=0.2)
    assert [round(cosine.at(done), 6) for done in (0, 0.1, 0.2, 0.6, 1)] == [0, 0.5, 1, 0.5, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": ["dense"]}, "unknown method"),
        ({"methods": "dense"}, "methods must be a list"),
        ({"methods": []}, "at least one"),
        ({"methods": ["vgc:alpha=-1"]}, "alpha"),
        ({"methods": ["nothing"]}, "nothing"),
        ({"task": "imagenet"}, "unknown task"),
        ({"optimizers": ["lamb"]}, "unknown optimizer"),
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"epochs": True}, "epochs must not be True"),
        ({"workers": 0}, "workers must be 1 or more"),
        ({"seeds": [0.5]}, "seeds must be a list"),
        ({"fronts": [-1]}, "fronts must be 0 or more"),
        ({"clip": -1}, "clip must be 0 or more"),
        ({"clip": "1"}, "clip must not be '1'"),
        ({"precision": "fp4"}, "precision must be one of"),
        ({"schedule": {"kind": "halving"}}, r"\[schedule.sgd\]"),
        ({"schedule": {"sgd": {"kind": "halving"}}}, "times"),
        ({"schedule": {"sgd": {"kind": "stairs"}}}, "kind must be one of"),
        ({"schedule": {"sgd": {"kind": "cosine", "warmup": 1.5}}}, "warmup"),
        ({"schedule": {"adam": {"kind": "cosine"}}}, "not among the optimizers"),
        ({"learning_rate": {"adam": 1.0}}, "not among the optimizers"),
        ({"also": {"methods": ["dense"]}}, r"also is written as \[\[also\]\]"),
        ({"every": [2]}, "vgc:alpha=1 every=2: local steps add up weights"),
        ({"methods": ["dense"], "every": [2], "delay": 2}, "dense every=2 delay=2: delay"),
        ({"methods": ["dense"], "every": [-1]}, "every must be 0 or more"),
        ({"every": [1.5]}, "every must be a list"),
        ({"outer_lr": "1"}, "outer_lr must not be '1'"),
        ({"fragments": 1.5}, "fragments must not be 1.5"),
        ({"also": [{"seeds": [1]}]}, "methods must be given"),
        ({"also": [{"methods": ["dense"], "epochs": 3}]}, "unknown epochs. Known: methods, rates, fronts, seeds"),
        ({"also": [{"methods": ["dense"], "seeds": []}]}, "at least one"),
        ({"also": [{"methods": ["dense"], "optimizers": ["lamb"]}]}, "unknown optimizer"),
    ],
)
def test_errors_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_table(GOOD | change)


def test_missing_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="epochs, methods must be given"):
        from_table({"task": "digits"})
    with pytest.raises(InputError, match="is no file"):
        read(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("task = ")
    with pytest.raises(InputError, match=r"broken\.toml"):
        read(broken)


def test_sizes_of_the_network(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 40)
    table = {"task": "text", "methods": ["dense"], "epochs": 1, "workers": 2, "batch": 2}
    task = open_task(from_table(table | {"model": {"width": 32, "depth": 1, "heads": 2, "context": 16}}), text)
    assert sum(p.numel() for p in task.make_model().parameters()) < 40_000
    with pytest.raises(InputError, match="knows no breadth; it knows context, depth, heads, width"):
        open_task(from_table(table | {"model": {"breadth": 32}}), text)
    with pytest.raises(InputError, match="takes 4096 samples"):
        open_task(from_table(table | {"batch": 2048}), text)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_experiments_can_be_read(path: Path) -> None:
    assert read(path).runs
