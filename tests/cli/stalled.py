"""A tool that has begun to read and cannot continue: it shows its progress to a pipe, or a terminal, that is
full. However fast it is, what comes next comes while it reads."""

import fcntl
import os
import pty
import subprocess
import time
from pathlib import Path

FULL_AT_LEAST = 4                                # times in a row


def fill(writer):
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    full = 0
    while full < FULL_AT_LEAST:                  # a terminal passes on what it has got a moment later
        try:
            while os.write(writer, b"x" * 4096):
                full = 0
        except BlockingIOError:
            full += 1
            time.sleep(0.1)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags)


def is_asleep(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def start(command, directory=None, on_terminal=False):
    """The process, once it waits for somebody to read its progress, and what drain() is to read."""
    reader, writer = pty.openpty() if on_terminal else os.pipe()
    fill(writer)
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    while process.poll() is None and not is_asleep(process):
        time.sleep(0.01)
    time.sleep(0.2)
    return process, reader


def drain(reader):
    """Reads the output of the tool, which continues with it."""
    text = b""
    try:
        while piece := os.read(reader, 65536):
            text += piece
    except OSError:                              # a terminal that nobody writes to any more
        pass
    os.close(reader)
    return text.decode().lstrip("x")
