"""Whole checkpoints through Python: save, load, convert, verify, diff, ls, runs; progress, stops and
Ctrl-C."""

import glob
import os
import signal
import subprocess
import sys
import tempfile
import threading
import unittest

import fsdp
import numpy


def states():
    w = numpy.arange(12, dtype="f4").reshape(3, 4)
    return {
        "model": {
            "w": w, "tied": w, "layers": [{"b": numpy.ones(2, "i8")}, {"b": numpy.zeros((0, 3), "f8")}],
            "pair": (numpy.array(3.0), numpy.array([True, False]))
        },
        "flat.name.with.dots": numpy.arange(3),
        "model.like.names": numpy.arange(2.0),
        "optim": {"state": {0: {"step": 7, "m": numpy.arange(5.0)}}, "betas": (0.9, 0.95)},
        "step": 3,
        "none": None,
        "text": "ä\0ö",
        "raw": b"\xff\0",
        "big": 1 << 70,
        "empty": {},
        "complex": 1 + 2j,
        "largest": (1 << 64) - 1,
        "flag": True,
        "deep": [1, [2, {"a": None}]],
    }


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)

    def path(self, name):
        return os.path.join(self.directory.name, name)

    def assertSame(self, a, b):
        self.assertEqual(type(a), type(b))
        if isinstance(a, dict):
            self.assertEqual(list(a), list(b))
            for key in a:
                self.assertSame(a[key], b[key])
        elif isinstance(a, (list, tuple)):
            self.assertEqual(len(a), len(b))
            for one, other in zip(a, b):
                self.assertSame(one, other)
        elif isinstance(a, numpy.ndarray):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
            self.assertTrue(numpy.array_equal(a, b))
        else:
            self.assertEqual(a, b)


class Tasks(Case):
    def test_what_is_saved_is_loaded(self):
        for kind in ("sharded", "full", "local"):
            fsdp.save(states(), self.path(kind), kind=kind, compress=kind == "full", step=3)
            loaded = fsdp.load(self.path(kind))
            self.assertSame(loaded, states())
            self.assertEqual(loaded["model"]["w"].ctypes.data, loaded["model"]["tied"].ctypes.data)
            self.assertEqual(fsdp.open(self.path(kind)).step, 3)

    def test_arrays_outlive_what_they_came_from(self):
        fsdp.save({"w": numpy.arange(1000.0)}, self.path("a"))
        array = fsdp.load(self.path("a"))["w"]
        with fsdp.open(self.path("a")) as checkpoint:
            other = checkpoint.get_tensor("w")
        self.assertEqual(float(array.sum() + other.sum()), 999000.0)
        array[0] = 5  # its memory is the caller's

    def test_views_are_saved_as_they_look(self):
        w = numpy.arange(24, dtype="f4").reshape(4, 6)
        state = {
            "t": w.T, "s": w[::2, ::3], "r": w[::-1], "big-endian": w.astype(">f4"),
            "scalar": numpy.float32(2.5)
        }
        fsdp.save(state, self.path("a"))
        loaded = fsdp.load(self.path("a"))
        for name in ("t", "s", "r"):
            self.assertTrue(numpy.array_equal(loaded[name], state[name]))
        self.assertTrue(numpy.array_equal(loaded["big-endian"], w))
        self.assertEqual(loaded["scalar"], 2.5)

    def test_load_into(self):
        fsdp.save(states(), self.path("a"))
        state = states()
        state["model"]["w"] *= 0
        state["step"], state["optim"]["state"][0]["step"] = 0, 0
        given = state["model"]["w"]
        fsdp.load(self.path("a"), into=state)
        self.assertSame(state, states())
        self.assertIs(state["model"]["w"], given)
        with self.assertRaises(fsdp.UsageError):
            fsdp.load(self.path("a"), into={"model": {"w": given}})
        with self.assertRaises(fsdp.UsageError):
            fsdp.load(self.path("a"), into={"model": {"w": given.T}}, partial=True)

    def test_save_in_other_formats(self):
        w = numpy.arange(6, dtype="f4").reshape(2, 3)
        state = {"model": {"w": w, "layers": [{"b": numpy.ones(2)}]}, "step": 4}
        for name in ("a.pt", "a.h5"):
            fsdp.save(state, self.path(name))
            self.assertSame(fsdp.load(self.path(name)), state)
        fsdp.save(state, self.path("dcp"), to="dcp", world_size=2)
        self.assertSame(fsdp.load(self.path("dcp")), state)
        for name in ("a.safetensors", "a.npz"):
            with self.assertRaisesRegex(fsdp.UsageError, "tensors only"):
                fsdp.save(state, self.path(name))
            fsdp.save(state, self.path(name), drop="values")
            self.assertTrue(numpy.array_equal(fsdp.load(self.path(name), flat=True)["model.w"], w))
        with self.assertRaises(fsdp.ExistsError):
            fsdp.save(state, self.path("a.pt"))

    def test_nothing_remains_of_a_refused_save(self):
        for bad in ({"a": object()}, {"a": {1.5: numpy.ones(1)}}, {"a": numpy.array(["text"])},
                    [numpy.ones(1)], {"a": numpy.array([1, "x"], object)}):
            with self.assertRaises(ValueError):
                fsdp.save(bad, self.path("a"))
        self.assertEqual(os.listdir(self.directory.name), [])

    def test_convert_plan_and_diff(self):
        fsdp.save(states(), self.path("a"))
        plan = fsdp.plan(self.path("a"), self.path("dcp"), to="dcp", world_size=2)
        self.assertEqual(plan.numbers["world"], 2)
        self.assertFalse(os.path.exists(self.path("dcp")))
        fsdp.convert(self.path("a"), self.path("dcp"), to="dcp", world_size=2)
        self.assertEqual(len(glob.glob(self.path("dcp") + "/*.distcp")), 2)
        differences = fsdp.diff(self.path("a"), self.path("dcp"))
        self.assertEqual((list(differences), differences.summary["differ"]), ([], 0))
        changed = states()
        changed["model"]["w"] = changed["model"]["w"] + numpy.eye(3, 4, dtype="f4")
        fsdp.save(changed, self.path("b"))
        found = {item.name: item for item in fsdp.diff(self.path("a"), self.path("b"))}
        self.assertEqual(found["model.w"].differing, 3)
        self.assertEqual((found["model.w"].why, found["model.w"].max_abs), ("data", 1.0))
        fsdp.convert(self.path("a"),
                     self.path("c"),
                     to="fsdp",
                     mesh={"dp": 2, "tp": 2},
                     drop=["values", "^optim"],
                     rename="s/^model[.]/m./",
                     dtype_for=["[.]w$=bf16"])
        with fsdp.open(self.path("c"), framework="array") as checkpoint:
            self.assertEqual(checkpoint.layout("m.w").mesh, {"dp": 2, "tp": 2})
            self.assertEqual(checkpoint.layout("m.w").placements, ("shard(0)", "shard(0)"))
            self.assertEqual(checkpoint.dtype("m.w"), "bf16")
            self.assertEqual(checkpoint.values(), {})

    def test_verify_names_the_damage(self):
        fsdp.save({"w": numpy.ones((64, 64))}, self.path("a"))
        self.assertTrue(fsdp.verify(self.path("a"), level="deep"))
        shard = glob.glob(self.path("a") + "/*.h5")[0]
        shard = next(name for name in glob.glob(self.path("a") + "/*.h5") if "index" not in name)
        with open(shard, "r+b") as file:
            at = file.read().index(numpy.ones(8).tobytes())
            file.seek(at + 100)
            file.write(b"\x55")
        report = fsdp.verify(self.path("a"))
        self.assertFalse(report)
        self.assertEqual((report.findings[0].kind, report.findings[0].tensor), ("damage", "w"))
        with self.assertRaises(fsdp.DamagedError) as caught:
            fsdp.load(self.path("a"))
        self.assertEqual(caught.exception.status, 4)
        self.assertIn("w", str(caught.exception))

    def test_runs(self):
        run = fsdp.Run(self.path("run"))
        for step in (10, 20, 30):
            run.save({"x": numpy.full(3, step)}, step, keep_last=2)
        self.assertEqual(run.steps(), [20, 30])
        self.assertTrue(run.latest().endswith("step-00000030"))
        self.assertEqual(run.load()["x"].tolist(), [30, 30, 30])
        with fsdp.open(run.path) as checkpoint:
            self.assertEqual(checkpoint.step, 30)
        with self.assertRaises(fsdp.ExistsError):
            run.save({"x": numpy.ones(1)}, 30)

    def test_ls(self):
        fsdp.save(states(), self.path("a"))
        entries = {entry.name: entry for entry in fsdp.ls(self.path("a"))}
        self.assertEqual(entries["model.w"][1:], ("tensor", "f32", (3, 4), 48, None))
        self.assertEqual((entries["model.tied"].kind, entries["model.tied"].value), ("alias", "model.w"))
        self.assertEqual(entries["optim.betas"].value, (0.9, 0.95))


class Running(Case):
    def test_progress_counts_up_to_the_total(self):
        seen = []
        fsdp.save({"x": numpy.zeros(32 << 20, "u1")},
                  self.path("a"),
                  progress=lambda *step: seen.append(step))
        self.assertEqual(seen[-1][0], seen[-1][1])
        self.assertEqual(sorted(step[0] for step in seen), [step[0] for step in seen])

    def test_an_exception_of_the_callback_stops_the_call_and_is_raised(self):
        class Enough(Exception):
            pass

        def stop(done, total, what):
            raise Enough

        with self.assertRaises(Enough):
            fsdp.save({"x": numpy.zeros(32 << 20, "u1")}, self.path("a"), progress=stop)
        self.assertEqual(os.listdir(self.directory.name), [])

    def test_ctrl_c(self):
        """A program that saves over and over is interrupted: it ends with KeyboardInterrupt, and loads what
        it has."""
        code = ("import fsdp, numpy, sys\nx = numpy.zeros(64 << 20, 'u1')\nprint('ready', flush=True)\n"
                "try:\n    while True: fsdp.save({'x': x}, sys.argv[1], overwrite=True)\n"
                "except KeyboardInterrupt: print('stopped', bool(fsdp.verify(sys.argv[1])))")
        for delay in (0.3, 0.37, 0.45):
            with self.subTest(delay):
                child = subprocess.Popen(
                    [sys.executable, "-c", code, self.path("a")], stdout=subprocess.PIPE, text=True)
                self.assertEqual(child.stdout.readline(), "ready\n")
                threading.Timer(delay, child.send_signal, [signal.SIGINT]).start()
                self.assertEqual(child.communicate(timeout=60)[0], "stopped True\n")
                self.assertEqual(child.returncode, 0)

    def test_calls_release_the_interpreter(self):
        fsdp.save({"x": numpy.zeros(64 << 20, "u1")}, self.path("a"))
        ticks, done = [], threading.Event()

        def tick():
            while not done.is_set():
                ticks.append(1)
                done.wait(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        for _ in range(5):
            fsdp.load(self.path("a"))
        done.set()
        thread.join()
        self.assertGreater(len(ticks), 20)

    def test_close_waits_for_reads_of_other_threads(self):
        fsdp.save({"x": numpy.zeros(64 << 20, "u1")}, self.path("a"))
        for _ in range(10):
            checkpoint = fsdp.open(self.path("a"))
            outcomes = []

            def read():
                try:
                    outcomes.append(checkpoint.get_tensor("x").nbytes)
                except ValueError as error:
                    outcomes.append(str(error))

            threads = [threading.Thread(target=read) for _ in range(3)]
            for thread in threads:
                thread.start()
            checkpoint.close()
            for thread in threads:
                thread.join()
            self.assertEqual(len(outcomes), 3)
            self.assertTrue(all(outcome == 64 << 20 or "is closed" in str(outcome) for outcome in outcomes),
                            outcomes)

    def test_prefetch(self):
        state = {f"w{i}": numpy.full(1 << 20, i, "u1") for i in range(20)}
        fsdp.save(state, self.path("a"))
        with fsdp.open(self.path("a")) as checkpoint:
            checkpoint.prefetch(checkpoint.keys(), memory=3 << 20)
            for i in range(20):
                self.assertEqual(int(checkpoint.get_tensor(f"w{i}")[5]), i)
            checkpoint.prefetch(["w3", "w4"])
        with fsdp.open(self.path("a")) as checkpoint:
            with self.assertRaises(KeyError):
                checkpoint.prefetch(["nope"])


if __name__ == "__main__":
    unittest.main()
