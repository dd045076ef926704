"""Hosts on which commands are started: by themselves all on 127.0.0.1, unshaped, where a lab cannot be built."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.tools.lab.rates import Rate

H = TypeVar("H", bound="Hosts")


class Hosts:
    """Numbered from 0. Here they have one interface together, which counts nothing by host; a Lab gives each its own.

    Until they are closed SIGTERM and SIGHUP are exits like any other, that clean up.
    """

    interface = "lo"

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._processes: list[subprocess.Popen[Any]] = []
        self._restore = exit_on_signals()

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._hosts

    def address(self, host: int) -> str:
        """The address of a host's interface."""
        return "127.0.0.1"

    @contextlib.contextmanager
    def meeting(self) -> Iterator[dict[str, str]]:
        """Where torch's processes meet, in its variables: a store of ours on the loopback.

        torch's own, which rank 0 would open, listens on every interface. Told that an agent has one, none is opened.
        """
        server = socket.create_server((self.address(0), 0))
        port = server.getsockname()[1]
        store = TCPStore(
            self.address(0), port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        yield {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        del store

    def set_rate(self, host: int, rate: Rate) -> None:
        """Change a host's link; on the loopback nothing is shaped."""

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, with `env` on top of this process's environment; `options` are Popen's.

        In a session of its own, so that Ctrl-C on the terminal comes here, and the lab ends what runs in it.
        """
        settings: dict[str, Any] = {"start_new_session": True, **options, "env": {**os.environ, **(env or {})}}
        process = subprocess.Popen([*self._prefix(host), *command], **settings)
        self._processes.append(process)
        return process

    def _prefix(self, host: int) -> list[str]:
        """What comes before a command, so that it runs there."""
        return []

    def close(self) -> None:
        """Kill what still runs on the hosts; once is enough, twice does no harm."""
        try:
            self._kill()
        except BaseException:  # Ctrl-C once more: not half done
            self._kill()
            raise
        finally:
            self._restore.close()

    def _kill(self) -> None:
        """The processes that were started, and what they have started in their sessions."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def exit_on_signals() -> contextlib.ExitStack:
    """Make SIGTERM and SIGHUP an exit until the stack is closed.

    Not where the program has a handler of its own, and not outside the main thread, where Python allows none.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    stack = contextlib.ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, leave)
                stack.callback(_restore, number)
    return stack


def _restore(number: signal.Signals) -> None:
    with contextlib.suppress(ValueError):  # a lab may be closed by another thread, which may set no handlers
        signal.signal(number, signal.SIG_DFL)
