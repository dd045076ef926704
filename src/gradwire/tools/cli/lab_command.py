"""`gradwire lab`: a command on hosts of their own, over links of chosen rates, and what went over each."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from gradwire.tools.cli.exit_codes import readable_errors
from gradwire.tools.cli.options import Loopback
from gradwire.tools.input_errors import InputError
from gradwire.tools.lab import Lab, clean, missing
from gradwire.tools.lab.commands import Change, CommandError, at_their_times, find_program, run
from gradwire.tools.lab.hosts import Hosts
from gradwire.tools.lab.rates import UNLIMITED, Link, parse_links
from gradwire.tools.train.launch import tidy_terminal


def lab(
    command: Annotated[list[str] | None, Argument(help="after --, as in: -- gradwire train --task digits")] = None,
    hosts: Annotated[int, Option(help="network namespaces, each with an address and a link of its own")] = 4,
    rate: Annotated[
        str, Option(help="of the links: 100 (Mbit/s), 1Gbit, 100/20 (up/down); 100,10: one a host")
    ] = UNLIMITED,
    change: Annotated[list[str] | None, Option(help="10s:20 is 20 Mbit/s after 10 seconds; may be repeated")] = None,
    loopback: Loopback = False,
    remove: Annotated[bool, Option("--clean", help="remove what killed labs have left, and run nothing")] = False,
) -> None:
    """Run a command once a host, as torchrun would on as many machines; then show the bytes of every host's link."""
    with readable_errors():
        if remove:
            show_cleaned()
            return
        find_program(command or [])
        links = parse_links(rate, hosts)
        changes = [parse_change(text, hosts) for text in change or []]
        if loopback:
            on_loopback(hosts, command or [])
        else:
            in_namespaces(links, command or [], changes)


def parse_change(text: str, hosts: int) -> Change:
    """ "10s:20" or "10s:100,20"."""
    seconds, colon, rates = text.partition(":")
    try:
        after_s = float(seconds.strip().removesuffix("s"))
    except ValueError:
        after_s = -1.0
    if not colon or not 0 <= after_s < float("inf"):
        raise InputError(f"--change {text}: give seconds and a rate, as in 10s:20")
    return Change(after_s, parse_links(rates, hosts))


def show_cleaned() -> None:
    if lacking := missing():
        raise InputError(f"--clean needs {lacking}")
    removed = clean()
    typer.echo(f"removed {', '.join(removed)}" if removed else "nothing was left over")


def on_loopback(hosts: int, command: list[str]) -> None:
    with Hosts(hosts) as local, tidy_terminal():
        typer.echo(
            f"{hosts} processes on 127.0.0.1, unshaped: rates have no effect and bytes are not counted", err=True
        )
        run(local, command)


def in_namespaces(links: list[Link], command: list[str], changes: list[Change]) -> None:
    with Lab(len(links), links) as network:
        begin = time.monotonic()
        try:
            with tidy_terminal():
                run(network, command, at_their_times(network, changes))
        except CommandError:
            Console().print(table(network, time.monotonic() - begin))
            raise
        Console().print(table(network, time.monotonic() - begin))


def table(network: Lab, seconds: float) -> Table:
    """What every host's interface has sent and received."""
    shown = Table(title=f"bytes by interface, headers included, in {seconds:.1f} s", title_justify="left")
    for name in ("host", "address", "link", "sent, MB", "packets", "received, MB", "packets"):
        shown.add_column(name, justify="left" if name in ("address", "link") else "right")
    for host, link in enumerate(network.links):
        count = network.counters(host)
        sent = f"{count.bytes_sent / 1e6:.3f}", f"{count.packets_sent:,}"
        received = f"{count.bytes_received / 1e6:.3f}", f"{count.packets_received:,}"
        shown.add_row(str(host), network.address(host), str(link), *sent, *received)
    return shown
