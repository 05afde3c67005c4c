"""Ports for the ranks' rendezvous."""

import random
import socket

held = []


def free_port():
    """A port that nobody else gets, by chance or from here: others are given theirs from 32768 on, and the
    socket stays bound until this process ends. SO_REUSEADDR, set after the bind, lets a rank listen there,
    which sets it too; another call of this function, which does not before its bind, is refused."""
    while True:
        probe = socket.socket()
        try:
            probe.bind(("127.0.0.1", random.randrange(10000, 32768)))
        except OSError:
            probe.close()
            continue
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.append(probe)
        return probe.getsockname()[1]
