"""`gradwire plan`: offline in this process, online with real workers, and bad input before anything starts."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.methods.base import Sum
from gradwire.methods.table import METHODS, Known
from gradwire.plan.duration import duration
from gradwire.plan.model import Cost, Network, Work, predict
from gradwire.plan.rounds import RoundCost
from gradwire.tools.cli import app

OFFLINE = ("--params", "124e6", "--backward-ms", "300", "--workers", "16", "--mbit", "1000", "--device", "cuda")


def invoke(*arguments: object, **environment: str) -> tuple[int, str]:
    """Exit code and everything said."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160", **environment})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def changed(**options: object) -> list[object]:
    """OFFLINE with other values; None leaves an option out."""
    given = dict(zip(OFFLINE[::2], OFFLINE[1::2], strict=True)) | {
        f"--{k.replace('_', '-')}": v for k, v in options.items()
    }
    return [part for option, value in given.items() if value is not None for part in (option, value)]


def test_offline_it_predicts_without_any_process_group(monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("offline needs no process group"))
    code, said = invoke(*OFFLINE, "--json", tmp_path / "plan.json", "--csv", tmp_path / "plan.csv")
    assert code == 0, said
    for spec in ("dense", "bf16", "powersgd:rank=4", "topk:density=0.01", "vgc:alpha=1.5"):
        assert f"│ {spec} " in said
    found = json.loads((tmp_path / "plan.json").read_text())
    assert said.strip().endswith(found["verdict"]["words"])
    work, network = Work(**found["work"]), Network(**found["network"])
    assert (work.numel, work.backward_ms, network.workers, network.mbit) == (124_000_000, 300, 16, 1000)
    for cost, row in zip(found["costs"], found["predictions"], strict=True):
        assert row["step_ms"] == pytest.approx(predict(work, network, Cost(**cost)).step_ms)
    with (tmp_path / "plan.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [row["method"] for row in found["predictions"]]
    assert float(rows[0]["bytes_a_step"]) == 4 * 124e6
    assert [row["chosen"] for row in rows].count("True") == 1


def test_a_fast_link_is_told_to_stay_with_a_cast():
    code, said = invoke(*changed(mbit="inf", latency_ms=0, workers=4))
    assert code == 0
    assert "compression would cost" in said.splitlines()[-1]
    assert said.splitlines()[-1].startswith(
        ("dense: on this link (no limit, 4 workers)", "bf16: on this link (no limit")
    )


def test_methods_and_density_are_followed():
    code, said = invoke(*changed(methods="bf16 vgc:alpha=2,zeta=0.99", density=0.5))
    assert code == 0
    assert "vgc:alpha=2,zeta=0.99" in said
    assert "dense" not in said
    sent = [line.split("│")[2].strip() for line in said.splitlines() if "│ vgc" in line]
    assert float(sent[0].replace(",", "")) > 30_000


def test_times_are_in_the_unit_one_would_say():
    code, said = invoke(*changed(mbit=1))
    assert code == 0
    assert "62 min with bf16" in said.splitlines()[-1]
    assert "e+0" not in said
    assert [duration(ms) for ms in (0, 18.84, 9_999, 10_000, 372_200, 7_440_000, math.inf)] == [
        *("0 ms", "18.8 ms", "9,999 ms", "10 s", "6.2 min", "2.07 h", "inf h")
    ]


@pytest.mark.parametrize("methods", ["dense bf16 powersgd:rank=4 topk:density=0.01", "bf16 vgc:alpha=1.5,zeta=0.9995"])
def test_eighty_columns_break_no_name_and_no_number(methods):
    code, said = invoke(*changed(mbit=1, methods=methods), COLUMNS="80")
    assert code == 0
    table = [line for line in said.splitlines() if "│" in line]
    assert len(table) == len(methods.split())
    assert max(map(len, table)) <= 80
    assert "…" not in said
    for spec, line in zip(methods.split(), table, strict=True):
        assert f"│ {spec} " in line
        assert re.search(r" (min|h|s|ms) │", line)


def test_a_name_too_long_for_the_screen_is_broken_between_its_options():
    spec = "vgc:alpha=1.5,zeta=0.9995,max_bytes_per_step=500000,momentum=0.9"
    code, said = invoke(*changed(methods=f"bf16 {spec}"), COLUMNS="80")
    assert code == 0
    for part in ("vgc:", "alpha=1.5,", "zeta=0.9995,", "max_bytes_per_step=500000,", "momentum=0.9"):
        assert re.search(rf"│ +{part} +│", said)


LOCAL = ("vgc:alpha=0,density=0.03,every=30", "diloco", "streaming_diloco:every=100,delay=5")


@pytest.mark.parametrize("columns", [80, 160])
def test_local_steps_stand_in_a_line_each_beside_the_methods(columns, tmp_path):
    path = tmp_path / "plan.json"
    code, said = invoke(*changed(methods=" ".join(("bf16", *LOCAL))), "--json", path, COLUMNS=str(columns))
    assert code == 0, said
    table = [line for line in said.splitlines() if "│" in line]
    assert len(table) == 4
    assert max(map(len, table)) <= columns
    assert "…" not in said
    for spec, line in zip(LOCAL, table[1:], strict=True):
        assert f"│ {spec} " in line
        assert re.search(r" (s|ms) │ +[\d.]+ % │", line)  # a step, and the share that waits
    words = " ".join(said.split())
    assert "all numbers are of an inner step on average" in words
    assert "Every worker trains alone between two exchanges" in said.splitlines()[-1]
    rows = {row["method"]: row for row in json.loads(path.read_text())["predictions"]}
    assert rows["diloco"]["bytes_a_step"] == pytest.approx(4 * 124e6 / 500, rel=1e-6)
    assert rows["diloco"]["round_ms"] == pytest.approx(500 * rows["diloco"]["step_ms"])
    assert rows["bf16"]["round_ms"] is None


def test_plans_without_local_steps_say_nothing_of_them():
    code, said = invoke(*OFFLINE)
    assert code == 0
    assert "inner step" not in said
    assert "every" not in said


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_chart_is_made(tmp_path, kind):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{kind}"
    arguments = changed(methods="bf16 vgc:alpha=1.5 diloco:every=30", chart=path)
    code, said = invoke(*arguments)
    assert code == 0, said
    content = path.read_bytes()
    assert len(content) > 10_000
    if kind == "svg":
        for words in ("vgc:alpha=1.5", "diloco:every=30", "workers", "Mbit/s", "step, ms"):
            assert words in content.decode()
        invoke(*arguments)
        assert path.read_bytes() == content  # the same plan is the same file


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mbit": 0}, "more than 0 Mbit/s, not 0.0. Give --mbit 1000"),
        ({"mbit": -5}, "more than 0 Mbit/s, not -5"),
        ({"mbit": "nan"}, "more than 0 Mbit/s, not nan"),
        ({"mbit": None}, "--params needs --mbit too"),
        ({"workers": None}, "--params needs --workers too"),
        ({"backward_ms": None, "mbit": None}, "--params needs --backward-ms and --mbit too"),
        ({"latency_ms": "nan"}, "latency must be 0 ms or more"),
        ({"latency_ms": -1}, "latency must be 0 ms or more"),
        ({"workers": 0}, "0 workers exchange nothing: plan for 2 or more"),
        ({"workers": 1}, "1 worker exchange nothing: plan for 2 or more"),
        ({"workers": -3}, "plan for 2 or more"),
        ({"params": 0}, "--params must be from 1 to 1e+11, not 0"),
        ({"params": "nan"}, "--params must be from 1"),
        ({"params": "inf"}, "--params must be from 1"),
        ({"backward_ms": -1}, "must be 0 or more"),
        ({"backward_ms": "nan"}, "must be 0 or more"),
        ({"after_ms": "inf"}, "must be 0 or more"),
        ({"density": 0}, "--density must be more than 0"),
        ({"density": 1.5}, "--density must be more than 0"),
        ({"margin": -0.1}, "--margin must be from 0 to 1"),
        ({"methods": "vgcc"}, "--methods vgcc: unknown compressor 'vgcc'; known: dense"),
        ({"methods": "bf16 vgc:beta=2"}, "unknown option 'beta=2' of vgc"),
        ({"methods": "vgc:every=30"}, "--methods vgc:every=30: local steps add up weights"),
        ({"methods": "diloco:every=0"}, "every must be a whole number of at least 1, got 0"),
        ({"methods": "diloco:rank=2"}, "diloco has no option 'rank=2'"),
        ({"methods": " "}, "--methods names none"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"chart": "plan.txt"}, "--chart plan.txt: a chart is a file of .svg, .png, .pdf"),
        ({"chart": "/no/such/plan.svg"}, "there is no folder /no/such"),
        ({"json": "/no/such/plan.json"}, "--json /no/such/plan.json: there is no folder"),
        ({"task": "digits"}, "give --task digits to measure, or --params"),
        ({"params": None}, "give --task digits to measure, or --params"),
    ],
)
def test_bad_input_is_refused(options, words):
    code, said = invoke(*changed(**options))
    assert code == 2
    assert words in " ".join(said.split())
    assert "│" not in said


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("--task", "digit"), {}, "unknown task 'digit'"),
        (("--task", "digits", "--mbit", "10"), {}, "--mbit: only with --params"),
        (("--task", "digits", "--workers", "1"), {}, "plan for 2 or more"),
        (("--task", "digits", "--workers", "1000"), {}, "fewer --workers"),
        (("--task", "digits", "--methods", "bf17"), {}, "unknown compressor 'bf17'"),
        (("--task", "digits", "--methods", "streaming_diloco"), {}, "fragments=4, and the model has 3 layers"),
        (("--task", "digits"), {"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, which is not in a plan of WORLD_SIZE 4"),
        (("--task", "digits"), {"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is -1, which is not in a plan"),
        (("--task", "digits"), {"RANK": "one", "WORLD_SIZE": "4"}, "RANK is one"),
        (("--task", "digits"), {"RANK": "0", "WORLD_SIZE": "1"}, "plan for 2 or more"),
        (("--task", "digits", "--workers", "3"), {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun has started 2"),
    ],
)
def test_bad_input_is_refused_before_workers_start(monkeypatch, arguments, environment, words):
    started = "gradwire.tools.cli.plan_command.launch"
    monkeypatch.setattr(started, lambda *_: pytest.fail("nothing may start"))
    code, said = invoke(*arguments, **environment)
    assert code == 2
    assert words in " ".join(said.split())


LATE = "vgc:alpha=0,density=0.02,every=5,fragments=2,delay=1"


def test_online_it_measures_and_decides(tmp_path):
    """Two real workers on loopback; the table is written once, by rank 0."""
    path = tmp_path / "plan.json"
    methods = f"dense bf16 topk:density=0.01 vgc {LATE}"
    options = ["--task", "digits", "--workers", "2", "--methods", methods, "--device", "cpu"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "plan", *options, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**environment, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("│ vgc ") == 1
    assert "on this link" in done.stdout.splitlines()[-1]
    check_measured(path)


def check_measured(path: Path) -> None:
    found = json.loads(path.read_text())
    work, network = Work(**found["work"]), Network(**found["network"])
    assert list(work.buckets) == [85_002]
    assert 0 < work.forward_ms < 500
    assert 0 < work.backward_ms < 500
    assert 0.1 < work.ready[0] <= 1.0
    assert work.beside == 0.0
    assert (network.workers, network.mbit > 10) == (2, True)
    late = [cost for cost in found["costs"] if cost["local"]]
    assert [(cost["spec"], cost["local"]["fragments"], cost["local"]["delay"]) for cost in late] == [(LATE, 2, 1)]
    assert 0 < late[0]["local"]["begin_ns"] < 1000
    assert 0 < late[0]["local"]["end_ns"] < 1000
    late[0]["local"] = RoundCost(**late[0]["local"])
    costs = {cost["spec"]: Cost(**cost) for cost in found["costs"]}
    assert 0.01 < costs[LATE].bytes_per_element < 0.06
    assert costs[LATE].moments == 1.0
    assert costs["dense"].handed_over(work.numel) == 4 * work.numel
    assert costs["bf16"].handed_over(work.numel) == 2 * work.numel
    assert 0.01 < costs["vgc"].bytes_per_element < 1
    assert 1.0 <= costs["vgc"].moments < 20
    assert costs["topk:density=0.01"].moments == 1.0
    assert costs["vgc"].encode_ns > 0
    for row in found["predictions"]:
        assert row["step_ms"] == pytest.approx(predict(work, network, costs[row["method"]]).step_ms)


@dataclass(frozen=True)
class Halved(Sum):
    """A method of somebody's own, of which nothing was measured: half of a dense sum."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16


def test_a_method_that_nobody_has_measured_is_planned_with_a_guess_that_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "halved", Known(Halved))
    for device in ("cpu", "cuda"):
        path = tmp_path / device
        code, said = invoke(*changed(methods="dense halved", device=device), "--json", path)
        assert code == 0, said
        assert "│ halved * " in said
        assert "│ dense  " in said
        assert "*: nobody has measured this method" in " ".join(said.split())
        rows = json.loads(path.read_text())["predictions"]
        assert [row["guess"] for row in rows] == [False, True]
        assert rows[1]["bytes_a_step"] == rows[0]["bytes_a_step"] / 2


def test_a_measured_method_is_no_guess():
    _, said = invoke(*OFFLINE)
    assert "*" not in said
