"""The same processes without namespaces: all on 127.0.0.1, unshaped, for machines where a lab cannot be built."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab.namespaces import exit_on_signals
from gradwire.tools.lab.rates import Rate


class Loopback:
    """Stands in for a Lab; its hosts have one interface together, which counts nothing by host."""

    interface = "lo"

    def __init__(self, hosts: int) -> None:
        if hosts < 1:
            raise InputError(f"{hosts} hosts: at least 1")
        self._hosts = hosts
        self._processes: list[subprocess.Popen[Any]] = []
        self._restore = exit_on_signals()

    def __len__(self) -> int:
        return self._hosts

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        """Everybody's."""
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
        """Nothing is shaped here."""

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """As Lab.start."""
        settings: dict[str, Any] = {"start_new_session": True, **options, "env": {**os.environ, **(env or {})}}
        process = subprocess.Popen(command, **settings)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill the processes that were started, and what they have started in their sessions."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._restore.close()
