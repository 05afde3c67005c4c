"""Ports for the ranks' rendezvous."""

import random
import socket


def free_port():
    """A port that nobody gets by chance: others are given theirs from 32768 on."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.randrange(10000, 32768)))
            except OSError:
                continue
            return probe.getsockname()[1]
