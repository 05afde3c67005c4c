"""Long calls: progress, Ctrl-C, and the library's notes.

A call of the library runs in a thread of its own while the main thread waits for it, because Python delivers
Ctrl-C to the main thread, and only while that runs Python code."""

import logging
import sys
import threading
from contextlib import contextmanager

from . import _bindings as c
from ._library import CancelledError

log = logging.getLogger("fsdp")


class Watch:
    """The callbacks of an fsdp_watch; kept while the call runs."""

    def __init__(self, progress=None):
        self._progress, self._stops, self._failure = progress, False, None
        types = dict(c.fsdp_watch._fields_)
        self._callbacks = types["progress"](self._report), types["notice"](self._notice)

    def fill(self, watch):
        watch.progress, watch.notice = self._callbacks

    def stop(self):
        self._stops = True

    def _report(self, _context, done, total, what):
        try:
            if self._progress and not self._stops:
                self._progress(done, total, (what or b"").decode("utf-8", "replace"))
        except BaseException as failure:  # raised by the call, after the library has cleaned up
            self._failure, self._stops = failure, True
        return self._stops

    def _notice(self, _context, text):
        log.warning("%s", text.decode("utf-8", "replace"))

    def run(self, work):
        """Runs work(). An exception of the progress callback stops it and is raised."""
        try:
            if threading.current_thread() is not threading.main_thread():
                return work()
            return self._run_beside(work)
        except CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise

    def _run_beside(self, work):
        outcome = {}

        def body():
            try:
                outcome["result"] = work()
            except BaseException as failure:
                outcome["failure"] = failure

        thread = threading.Thread(target=body, name="fsdp", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            self.stop()
            thread.join()  # the library leaves nothing half-written
            raise
        if "failure" in outcome:
            raise outcome["failure"]
        return outcome["result"]


@contextmanager
def shown(progress, name):
    """The callback for a `progress` argument: None, a callable (done, total, name), or True for a bar."""
    if progress is None or progress is False:
        yield None
    elif progress is not True:
        yield progress
    else:
        with _bar(name) as callback:
            yield callback


@contextmanager
def _bar(name):
    try:
        from tqdm.auto import tqdm
    except ImportError:
        last = [-1]

        def line(done, total, _what):
            part = int(100 * done / total) if total else 100
            if part != last[0]:
                last[0] = part
                print(f"\r{name}: {part} %", end="", file=sys.stderr, flush=True)
        try:
            yield line
        finally:
            print(file=sys.stderr)
        return
    with tqdm(desc=name, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        def update(done, total, _what):
            bar.total = total
            bar.update(done - bar.n)
        yield update
