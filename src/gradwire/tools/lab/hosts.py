"""What a lab of namespaces and its stand-in on the loopback have in common: hosts on which commands are started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

from gradwire.tools.lab.rates import Rate

H = TypeVar("H", bound="Hosts")


class Hosts(ABC):
    """Numbered from 0. Until they are closed SIGTERM and SIGHUP are exits like any other, that clean up."""

    interface: str  # of each

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[Any]] = []
        self._restore = exit_on_signals()

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def address(self, host: int) -> str:
        """The address of a host's interface."""

    @abstractmethod
    def meeting(self) -> contextlib.AbstractContextManager[dict[str, str]]:
        """Where torch's processes meet, in its variables."""

    @abstractmethod
    def set_rate(self, host: int, rate: Rate) -> None:
        """Change a host's link at once, under whatever runs; what waits in its queue is sent at the new rate."""

    @abstractmethod
    def close(self) -> None:
        """Kill what still runs on the hosts; once is enough, twice does no harm."""

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
