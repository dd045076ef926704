"""The same processes without namespaces: all on 127.0.0.1, unshaped, for machines where a lab cannot be built."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab.hosts import Hosts
from gradwire.tools.lab.rates import Rate


class Loopback(Hosts):
    """Stands in for a Lab; its hosts have one interface together, which counts nothing by host."""

    interface = "lo"

    def __init__(self, hosts: int) -> None:
        if hosts < 1:
            raise InputError(f"{hosts} hosts: at least 1")
        self._hosts = hosts
        super().__init__()

    def __len__(self) -> int:
        return self._hosts

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

    def close(self) -> None:
        """Kill the processes that were started, and what they have started in their sessions."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._restore.close()
