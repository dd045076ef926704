"""The bytes of a replay: what is read from a trace, what a ring puts on a link, and how it is cut into buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwire
from gradwire.methods import from_spec
from gradwire.tools.input_errors import InputError
from gradwire.tools.race.replay import Setting, cases, link_bytes, on_host, parts_of
from gradwire.tools.race.trace import ByteTrace, Sample, StepBytes, load, thin

MIB = 1 << 20


def test_what_a_ring_puts_on_a_link():
    assert link_bytes(1000, "gather", 8) == 7000
    assert link_bytes(1000, "sum", 8) == 1750
    assert link_bytes(1000, "gather", 2) == link_bytes(1000, "sum", 2) == 1000


@pytest.mark.parametrize("collective", ["gather", "sum"])
@pytest.mark.parametrize(("workers", "hosts"), [(8, 8), (8, 4), (64, 2), (3, 2)])
def test_fewer_hosts_put_as_much_on_a_link_as_all_workers(collective, workers, hosts):
    mine = on_host(12345, collective, workers, hosts)
    assert link_bytes(mine, collective, hosts) == pytest.approx(link_bytes(12345, collective, workers))
    assert (mine == 12345) == (workers == hosts)


def test_buckets_are_ddps():
    assert parts_of(MIB / 2, 25) == [1.0]
    assert parts_of(60 * MIB, 25) == pytest.approx([1 / 60, 25 / 60, 25 / 60, 9 / 60])
    assert parts_of(60 * MIB, 100) == pytest.approx([1 / 60, 59 / 60])


def test_cases_are_the_samples_and_the_sums_beside_them():
    trace = ByteTrace([Sample(1, 3000, 60 * MIB), Sample(2, 6000, 60 * MIB)], 100)
    found = cases(trace, Setting(8, 4), "gather", ["dense", "bf16"])
    assert [(case.what, case.collective, case.place) for case in found] == [
        ("trace", "gather", 1),
        ("trace", "gather", 2),
        ("dense", "sum", 0),
        ("bf16", "sum", 0),
    ]
    assert sum(found[0].buckets) == pytest.approx(3000 * 7 / 3, abs=4)
    assert found[1].link_bytes == 42000
    assert sum(found[3].buckets) == pytest.approx(30 * MIB * (7 / 8) / (3 / 4), abs=4)
    assert found[3].dtype == "bfloat16"
    assert all(len(case.buckets) == len(case.parts) == 4 for case in found)


def test_steps_that_send_nothing_are_a_round_with_the_one_that_does(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [(1, 0), (2, 0), (3, 300), (4, 0), (5, 0), (6, 330), (7, 0)]
    path.write_text("step,bytes,dense_bytes\n" + "".join(f"{step},{n_bytes},4000\n" for step, n_bytes in rows))
    found = load(path, 5)
    assert found == ByteTrace([Sample(3, 300, 4000, 3), Sample(6, 330, 4000, 3)], 7)
    one, two, dense = cases(found, Setting(4, 4, bucket_mib=0.1), "gather", ["dense"])
    assert (one.steps, one.buckets, one.parts, two.buckets, dense.steps) == (3, [300], [1.0], [330], 1)
    path.write_text("step,bytes,dense_bytes\n1,0,4000\n")
    with pytest.raises(InputError, match="not a byte was sent"):
        load(path, 5)
    path.write_text("epoch,bytes_a_step,dense_bytes_a_step\n1,0,4000\n")
    with pytest.raises(InputError, match="row 1: bytes must be positive"):
        load(path, 5)


def test_a_collective_is_told_by_its_bytes():
    assert ByteTrace([Sample(1, 400, 400)], 1).collective == "sum"
    assert ByteTrace([Sample(1, 200, 400), Sample(2, 200, 400)], 2).collective == "sum"
    assert ByteTrace([Sample(1, 200, 400), Sample(2, 120, 400)], 2).collective == "gather"


def test_a_section_is_its_median_step():
    every = [Sample(place, n_bytes, 100) for place, n_bytes in enumerate([9, 1, 5, 7, 8, 30, 2], 1)]
    assert [s.n_bytes for s in thin(every, 2)] == [5, 7]  # of 9 1 5 and of 7 8 30 2
    assert [s.n_bytes for s in thin(every, 1)] == [7]
    assert thin(every, 7) == thin(every, 100) == every


def test_an_experiments_file_is_a_trace(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("epoch,step,bytes_a_step,dense_bytes_a_step\n1,97,50.5,4000\n2,194,20,4000\n")
    assert load(path, 5) == ByteTrace([Sample(1, 50.5, 4000), Sample(2, 20, 4000)], 194)


def test_a_simulation_writes_a_trace(tmp_path):
    path = tmp_path / "trace.csv"
    model = nn.Linear(20, 10)
    simulation = gradwire.simulate(
        model, from_spec("vgc:alpha=1"), lambda m, x, y: nn.functional.cross_entropy(m(x), y), workers=2
    )
    trace = StepBytes(simulation, path)
    for _ in range(3):
        simulation.backward(torch.randn(2, 4, 20), torch.randint(10, (2, 4)))
        trace.step()
    found = load(path, 10)
    assert [s.place for s in found.samples] == [1, 2, 3]
    assert sum(s.n_bytes for s in found.samples) == simulation.stats().bytes_sent
    assert all(s.dense_bytes == 840 for s in found.samples)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no file"),
        ("", "is no trace"),
        ("epoch,seconds\n1,2\n", "is no trace: a CSV with the columns bytes_a_step"),
        ("step,bytes,dense_bytes\n1,x,4\n", "row 1: could not convert"),
        ("step,bytes,dense_bytes\n1,4,4\n2,-1,4\n", "row 2: bytes must be positive"),
        ("step,bytes,dense_bytes\n1,4,4\n2\n", "row 2"),
    ],
)
def test_what_is_no_trace(content, message, tmp_path):
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        load(path, 5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"workers": 1, "hosts": 1}, "--hosts must be 2 or more"),
        ({"workers": 4, "hosts": 8}, "no more hosts than workers"),
        ({"workers": 4, "hosts": 4, "steps": 0}, "--steps must be 1 or more"),
        ({"workers": 4, "hosts": 4, "compute_ms": -1.0}, "--compute-ms must be 0 or more"),
        ({"workers": 4, "hosts": 4, "compute_ms": float("nan")}, "--compute-ms must be 0 or more"),
        ({"workers": 4, "hosts": 4, "bucket_mib": 0.0}, "--bucket-mib must be"),
    ],
)
def test_what_cannot_be_replayed(setting, message):
    with pytest.raises(InputError, match=message):
        Setting(**setting)
