"""Hosts of their own on one machine: a network namespace each, joined by a bridge, with one shaped link a host.

iproute2 builds them; all of its commands go through `call`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab.hosts import Hosts
from gradwire.tools.lab.rates import UNLIMITED, Link, Rate, Rates, parse_link, parse_links, token_bucket

INTERFACE, BRIDGE, PORT = "eth0", "bridge0", "host"  # PORT and its number: the bridge's end of a host's link
NETWORK = "10.213.0"  # nothing outside the namespaces sees it, so that several labs may have the same addresses
# The settings of a namespace, each only where the machine has it and allows it.
# IPv6: nothing is to be sent that no program has sent. Congestion control: BBR, where it is the machine's default, gave
# one of two directions at 10 Mbit/s 57 % of its rate; cubic is most machines' own, and Reno is allowed everywhere.
SETTINGS = """cd /proc/sys/net
echo 1 > ipv6/conf/default/disable_ipv6
for name in cubic reno; do echo $name > ipv4/tcp_congestion_control && break; done
true"""

FOLDER = Path("/run/netns")  # where `ip netns` keeps the names
NAME = re.compile(r"gradwire-(\d+)-\d+(-bridge)?")  # the first number: the process whose lab it is
KILLED_S = 5.0  # a process that takes longer to die waits for a disk: its namespace ends with it

SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # not everybody's PATH has them
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bits; in a container root may lack them

_numbers = itertools.count()


class LabError(Exception):
    """A command of iproute2 has failed; the message has its words."""


@dataclass(frozen=True)
class Counters:
    """What went over a host's interface, headers included; a packet of up to 64 KB that was never cut counts as one."""

    bytes_sent: int
    packets_sent: int
    bytes_received: int
    packets_received: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(vars(self).values(), vars(before).values(), strict=True)))


class Lab(Hosts):
    """`with Lab(hosts=4, rate="100Mbit") as lab:` hosts that see each other and nothing else of the machine's network.

    host n: namespace gradwire-<pid>-<n>, eth0 = 10.213.0.<n+1>  --veth--  bridge in a namespace of its own
    Both ends of every veth pair are shaped by tbf: the host's end is its way up, the bridge's end its way down.
    """

    interface = INTERFACE

    def __init__(self, hosts: int, rate: Rates = UNLIMITED) -> None:
        self.links = parse_links(rate, hosts)
        if lacking := missing():
            raise InputError(
                f"a lab of network namespaces needs {lacking}. Without it, `gradwire lab --loopback` runs the same "
                "processes on 127.0.0.1, unshaped"
            )
        clean()
        numbers = [next(_numbers) for _ in range(hosts)]
        self.names = [f"gradwire-{os.getpid()}-{number}" for number in numbers]
        self.bridge = f"{self.names[0]}-bridge"
        super().__init__(hosts)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        remove([self.bridge, *self.names])  # of a killed process that had our number
        for name in (self.bridge, *self.names):
            call("ip", "netns", "add", name)
            call("ip", "netns", "exec", name, "sh", "-c", SETTINGS)
        within = ["ip", "-n", self.bridge, "link"]
        call(*within, "add", "name", BRIDGE, "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        call(*within, "set", "dev", BRIDGE, "up")
        for host, name in enumerate(self.names):
            port = f"{PORT}{host}"
            call(*within, "add", "name", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            call(*within, "set", "dev", port, "master", BRIDGE)
            call("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self._shape(host, Link(None, None), self.links[host])
            call(*within, "set", "dev", port, "up")
            for device in ("lo", INTERFACE):
                call("ip", "-n", name, "link", "set", "dev", device, "up")

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    @contextlib.contextmanager
    def meeting(self) -> Iterator[dict[str, str]]:
        """torch's processes meet on host 0, which nobody outside the lab can reach."""
        yield {}

    def set_rate(self, host: int, rate: Rate) -> None:
        """Change a host's link at once, under whatever runs; what waits in its queue is sent at the new rate."""
        link = parse_link(rate)
        self._shape(host, self.links[host], link)
        self.links[host] = link

    def _shape(self, host: int, before: Link, link: Link) -> None:
        _shape(self.names[host], INTERFACE, before.up, link.up)
        _shape(self.bridge, f"{PORT}{host}", before.down, link.down)

    def _prefix(self, host: int) -> list[str]:
        return [find("ip") or "ip", "netns", "exec", self.names[host]]

    def counters(self, host: int) -> Counters:
        """What the host's interface has sent and received since the lab was built."""
        (shown,) = json.loads(call("ip", "-n", self.names[host], "-s", "-j", "link", "show", "dev", INTERFACE))
        sent, received = shown["stats64"]["tx"], shown["stats64"]["rx"]
        return Counters(sent["bytes"], sent["packets"], received["bytes"], received["packets"])

    def _kill(self) -> None:
        """What runs in the namespaces, and these too."""
        for process in self._processes:  # those too that `ip netns exec` has not yet brought into their namespace
            process.kill()
        remove([*self.names, self.bridge])
        for process in self._processes:
            process.wait()


def _shape(namespace: str, device: str, before: float | None, mbit: float | None) -> None:
    where = ["dev", device, "root"]
    if mbit is not None:
        call("tc", "-n", namespace, "qdisc", "replace", *where, *token_bucket(mbit))  # of the same kind: a change
    elif before is not None:
        call("tc", "-n", namespace, "qdisc", "delete", *where)


def clean() -> list[str]:
    """Remove the namespaces of labs whose process is gone (SIGKILL leaves them), and return their names."""
    names = sorted(path.name for path in FOLDER.glob("gradwire-*") if is_left_over(path.name))
    remove(names)
    return names


def is_left_over(name: str) -> bool:
    """Whether the process that made a namespace is gone."""
    match = NAME.fullmatch(name)
    return match is not None and not runs(int(match[1]))


def runs(pid: int) -> bool:
    """Whether there is such a process; a zombie's work is over."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def remove(names: Iterable[str]) -> None:
    """Kill what runs in these namespaces and delete them. Those that are gone already are none of our business."""
    present = [name for name in names if (FOLDER / name).exists()]
    deadline = time.monotonic() + KILLED_S
    while kill(present) and time.monotonic() < deadline:  # again: what has been killed may have started another
        time.sleep(0.01)
    for name in present:
        try:
            call("ip", "netns", "delete", name)
        except LabError:
            if (FOLDER / name).exists():  # otherwise another process has cleaned up at the same time
                raise


def kill(names: Iterable[str]) -> int:
    """Kill every process in these namespaces, and return how many there were."""
    pids = []
    for name in names:
        with contextlib.suppress(LabError):
            pids += call("ip", "netns", "pids", name).split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return len(pids)


def missing() -> str:
    """What this machine lacks for network namespaces of our own, in words; empty where nothing is missing."""
    if sys.platform != "linux":
        return "Linux: network namespaces are its own"
    lacking = [f"the command {name} (package iproute2)" for name in ("ip", "tc") if find(name) is None]
    if os.geteuid() != 0:
        lacking.append("root: try sudo")
    else:
        lacking += [f"{name}, which this container's root has not" for name in CAPABILITIES if not holds(name)]
    return ", ".join(lacking)


def find(name: str) -> str | None:
    """Where a program is."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), SYSTEM_PATH]))


def holds(capability: str) -> bool:
    """Whether this process has a capability."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAPABILITIES[capability] & 1)
    return False


def call(*words: str) -> str:
    """Run ip or tc and return what it prints."""
    # in a session of its own: Ctrl-C on a terminal must not end the command that cleans up
    command = [find(words[0]) or words[0], *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LabError(f"`{shlex.join(words)}` failed: {said}")
    return done.stdout
