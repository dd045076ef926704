"""The probe in real processes: all ranks come to the same network, and in a lab it is the link's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from gradwire.plan.model import Network
from gradwire.plan.probe import network_of, probe
from gradwire.tools.lab import Lab, missing
from gradwire.tools.lab.commands import environment

PAYLOAD = 1448 / 1514  # of a link's rate: what TCP carries of every full packet
SCRIPT = """
import dataclasses, json, os, torch, torch.distributed as dist
from gradwire.plan.probe import probe
dist.init_process_group("gloo")
network = probe(dist.group.WORLD, torch.device("cpu"))
print(json.dumps(dataclasses.asdict(network)), flush=True)
dist.barrier()
os._exit(0)
"""


def look(at_most_s: float) -> tuple[Network, float]:
    begin = time.perf_counter()
    return probe(dist.group.WORLD, torch.device("cpu"), at_most_s=at_most_s), time.perf_counter() - begin


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_have_the_same_network(spawn, world_size):
    found = spawn(world_size, look, 1.0)
    networks = {network for network, _ in found}
    assert len(networks) == 1  # equal bit for bit: floats are compared exactly
    network = networks.pop()
    assert network.workers == world_size
    assert 50 < network.mbit < 1e6  # loopback, on a machine that may be busy
    assert 0 < network.latency_ms < 100
    sizes = [point[0] for point in network.curve]
    assert sizes[0] == 1024
    assert {after / before for before, after in pairwise(sizes)} <= {4, 16}
    assert len(sizes) > 2


def test_it_ends_in_time(spawn):
    assert max(took for _, took in spawn(2, look, 0.2)) < 3


def look_alone() -> Network:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return probe(group, torch.device("cpu"))


def test_one_worker_has_no_link(spawn):
    assert spawn(2, look_alone) == [Network(1, math.inf, 0.0)] * 2


def test_a_network_gives_back_what_was_measured():
    points = [(1024, 6.0, 3.0), (65_536, 12.0, 9.0), (1 << 20, 100.0, 220.0)]
    network = network_of(4, points)
    assert network.workers == 4
    assert network.latency_ms == pytest.approx(1.0)  # 6 hops, and 3
    assert network.mbit == pytest.approx(((1 << 20) - 65_536) * 8 / 1e3 / (100 - 12))  # what more bytes take
    assert network.collective_ms(4 << 20, False) == pytest.approx(100 + (3 << 20) * 8 / 1e3 / network.mbit)
    for n_bytes, summed, gathered in points:
        assert network.collective_ms(n_bytes, False) == pytest.approx(summed)
        assert network.collective_ms(n_bytes, True) == pytest.approx(gathered)
    slow = network_of(2, [(1024, 80.0, 90.0)])  # there was no time for more
    assert slow.mbit == pytest.approx(1024 * 8 / 1e3 / 80.0)


@pytest.mark.skipif(bool(missing()), reason=f"a lab needs {missing()}")
def test_in_a_lab_it_is_the_rate_of_the_link():
    for _ in range(3):  # once more where a machine with other work was late
        network = in_lab(3, 50)
        if 0.9 < network["mbit"] / (PAYLOAD * 50) < 1.1:
            break
    assert network["mbit"] == pytest.approx(PAYLOAD * 50, rel=0.1)
    assert network["workers"] == 3


def in_lab(hosts: int, mbit: int) -> dict[str, float]:
    with Lab(hosts, f"{mbit}Mbit") as lab:
        pipes = {"stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", SCRIPT]
        env = [{**environment(lab, host, 29500), "PYTHONPATH": os.pathsep.join(sys.path)} for host in range(hosts)]
        running = [lab.start(host, command, env[host], **pipes) for host in range(hosts)]
        said = [process.communicate(timeout=90)[0] for process in running]
    assert len(set(said)) == 1
    return json.loads(said[0])
