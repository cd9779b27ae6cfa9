#!/usr/bin/env python3
"""A remote shell between virtual nodes, over their network, for launchers of MPI jobs.

`remote_shell.py [OPTION...] NODE COMMAND...` runs a command on a node, as ssh does.
`remote_shell.py --serve TEXT` is the first process of a node: it prints TEXT when it
takes commands, and ends, and with it the node, at the end of its standard input. What
is sent crosses the virtual wire, so a launcher notices of a cut cable or a lost node
what it would notice by ssh. Like rsh, it returns no exit status.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading

PORT = 514
_BLOCK_BYTES = 1 << 16
# Asks every 4 s and ends when a node has been silent for 40 s, as ssh does with
# ServerAliveInterval: long after the other ranks have said who is lost
_ALIVE = [
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 4),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 4),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 9),
]


def serve(text: str) -> None:
    """Run the commands that are sent; print `text` when that can begin."""
    # Orphans of the node become children of its first process
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    with socket.create_server(("", PORT)) as server:
        print(text, flush=True)
        while True:
            ready, _, _ = select.select([server, 0], [], [])
            if 0 in ready and not os.read(0, _BLOCK_BYTES):
                os._exit(0)
            if server in ready:
                connection, _ = server.accept()
                if os.fork() == 0:
                    server.close()
                    _become_command(connection)
                connection.close()


def _become_command(connection: socket.socket) -> None:
    """Run the command that is sent in place of this process."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb", buffering=0) as stream:
        command = stream.readline().decode()
    for descriptor in range(3):
        os.dup2(connection.fileno(), descriptor)
    os.execv("/bin/sh", ["sh", "-c", command])


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(node: str, command: str) -> None:
    """Run a command on a node, with this process's input and output."""
    with socket.create_connection((node, PORT)) as connection:
        for option, value in _ALIVE:
            connection.setsockopt(*option, value)
        connection.sendall(command.replace("\n", " ").encode() + b"\n")
        threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
        try:
            while block := connection.recv(_BLOCK_BYTES):
                os.write(1, block)
        except OSError as error:
            sys.exit(f"{node} does not answer: {error}")


def _send_input(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := os.read(0, _BLOCK_BYTES):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    words = sys.argv[1:]
    while words[0].startswith("-"):  # options of ssh that launchers add
        del words[0]
    run(words[0], " ".join(words[1:]))
