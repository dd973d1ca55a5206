"""TCP connections between process 0 and every other process, which detect lost processes and machines.

A killed process closes its connection. A machine that is off or unreachable answers no keep-alive probe. A
suspended process is not detected, because its kernel still answers.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

IDLE, INTERVAL, PROBES = 4, 2, 4  # seconds to the first probe, between probes; number of probes (12 s)
FAREWELL = b"done"
ENOUGH = 60.0  # timeout for connecting, in seconds


class Links:
    """Connections that call `lost` from a separate thread if a process ends without a farewell message.

    Args:
        rank: Rank of this process.
        world: Number of processes.
        exchange: Collective that gathers bytes from every process, in order of rank.
        lost: Receives a description of the lost process.
    """

    def __init__(
        self, rank: int, world: int, exchange: Callable[[bytes], list[bytes]], lost: Callable[[str], None]
    ) -> None:
        self.rank, self.world, self.lost = rank, world, lost
        self.sockets: list[socket.socket] = []
        self.over = False
        server = socket.create_server(("", 0), backlog=world) if rank == 0 else None
        port = server.getsockname()[1] if server else 0
        peers = [data.decode().split(" ", 1) for data in exchange(f"{port} {socket.gethostname()}".encode())]
        self.hosts = [host for _, host in peers]
        if server:
            self._accept(server)
        else:
            self._connect(int(peers[0][0]))

    def _accept(self, server: socket.socket) -> None:
        with server:
            server.settimeout(ENOUGH)
            for _ in range(self.world - 1):
                link, _ = server.accept()
                link.settimeout(ENOUGH)
                # Not authenticated: a foreign client on this port can only cause a timeout.
                other = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")
                self._listen(link, other)

    def _connect(self, port: int) -> None:
        link = socket.create_connection((os.environ.get("MASTER_ADDR", "127.0.0.1"), port), ENOUGH)
        link.sendall(self.rank.to_bytes(4, "big"))
        self._listen(link, 0)

    def _listen(self, link: socket.socket, other: int) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Linux only; other systems keep their default probes.
        probes = {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": INTERVAL, "TCP_KEEPCNT": PROBES}
        for name, value in probes.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sockets.append(link)
        where = f"on {self.hosts[other]}, {link.getpeername()[0]}"
        threading.Thread(target=self._wait, args=(link, other, where), daemon=True).start()

    def _wait(self, link: socket.socket, other: int, where: str) -> None:
        try:
            heard = link.recv(len(FAREWELL), socket.MSG_WAITALL)
            why = "its process ended without a word, as one that is killed does"
        except OSError as error:
            heard, why = b"", f"no sign of its machine: {error.strerror or error}"
        if heard != FAREWELL and not self.over:
            self.lost(f"process {other} of {self.world} ({where}) is gone: {why}")

    def close(self) -> None:
        """Send the farewell message to the other side of every connection, and close for writing."""
        self.over = True
        for link in self.sockets:
            with suppress(OSError):
                link.sendall(FAREWELL)
                link.shutdown(socket.SHUT_WR)
