"""Tensors of three slabs of 4 MiB, the last one partial: what a tool says of a tensor is no matter of the
slab that it reads last.

usage: large_tensors.py BUILD
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors_file

BUILD = Path(sys.argv[1]).resolve()
ROWS, COLUMNS = 2700, 1000
SLAB = (4 << 20) // 4 // COLUMNS  # rows of f32: a slab is whole rows
STACKED, PLAIN = "layers.0.experts.w", "layers.0.w"  # of two experts


def write(folder, tensors):
    """A model of a family that no table has."""
    folder.mkdir()
    safetensors_file.write(folder / "model.safetensors", {
        name: ("F32", values.shape, values.astype("<f4").tobytes()) for name, values in tensors.items()})
    (folder / "config.json").write_text('{"model_type": "of no table"}')


def model(name, seed):
    shape = (2, ROWS, COLUMNS) if name == STACKED else (ROWS, COLUMNS)
    return np.random.default_rng(seed).standard_normal(shape, "f4")


# --- what a slab alone would tell of a tensor: each changes one, and returns what is found of it ------


def a_value_in_the_first_slab(rows):
    rows[:] = 0
    rows[0, 7] = 1
    return f"holds zeros only in elements {rows.size // 8} to {rows.size - 1} of {rows.size}"


def a_value_in_the_last_slab(rows):
    rows[:] = 0
    rows[-1, -1] = 1
    return f"holds zeros only in elements 0 to {rows.size // 8 * 7 - 1} of {rows.size}"


def slabs_of_equal_elements(rows):
    for i in range(3):
        rows[i * SLAB:] = i + 1


def a_first_slab_of_zeros(rows):
    rows[:] = 1
    rows[:SLAB] = 0
    return f"holds zeros only in elements 0 to {rows.size // 8 * 3 - 1} of {rows.size}"


def zeros(rows):
    rows[:] = 0
    return "holds zeros only"


def nan_in_two_slabs(rows):
    rows[[5, SLAB - 1, -1], 3] = np.nan
    return "holds 3 NaN"


def infinities_in_two_slabs(rows):
    rows[[0, SLAB, SLAB + 1, 2 * SLAB], 0] = np.inf
    return "holds 4 Inf"


def experts_with_values_in_one_slab(experts):
    experts[0, 1:] = 0
    experts[1, :-1] = 0


def an_expert_of_zeros(experts):
    experts[1] = 0
    return "holds zeros only for expert 1"


def experts_that_differ_in_the_first_slab(experts):
    experts[1] = experts[0]
    experts[1, 0, 0] += 1


def experts_that_differ_in_the_last_slab(experts):
    experts[1] = experts[0]
    experts[1, -1, -1] += 1


def equal_experts(experts):
    experts[1] = experts[0]
    return "has equal experts 0 and 1"


CHANGES = {PLAIN: [a_value_in_the_first_slab, a_value_in_the_last_slab, slabs_of_equal_elements,
                   a_first_slab_of_zeros, zeros, nan_in_two_slabs, infinities_in_two_slabs],
           STACKED: [experts_with_values_in_one_slab, an_expert_of_zeros, equal_experts,
                     experts_that_differ_in_the_first_slab, experts_that_differ_in_the_last_slab]}


def a_last_slab_like_the_first_element(rows):
    rows[0, 0] = 3
    rows[2 * SLAB:] = 3


def a_constant(rows):
    rows[:] = 3
    return f"encoder.{PLAIN} is extra: 'wanted' has no such tensor"


def verify_copy(root, change):
    """A second name of a tensor is the same tensor; constants of layers are not."""
    values = model(PLAIN, 2)
    wanted = change(values)
    write(root / "wanted", {PLAIN: values})
    write(root / "copy", {PLAIN: values, f"encoder.{PLAIN}": values})
    words = [BUILD / "bin/fsdp-verify", "--json", "copy", "--like", "wanted", "--mem", "1"]
    ran = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=60)
    found = [finding["text"] for finding in json.loads(ran.stdout)["paths"][0]["findings"]]
    assert found == ([wanted] if wanted else []), f"a copy, {change.__name__}: {found}, not {wanted}"
    shutil.rmtree(root / "wanted")
    shutil.rmtree(root / "copy")


def verify(root, name, change):
    values = model(name, 2)
    wanted = change(values)
    write(root / change.__name__, {name: values})
    words = [BUILD / "bin/fsdp-verify", "--json", change.__name__, "--like", f"good.{name}", "--mem", "1"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FSDP_")}
    ran = subprocess.run(words, cwd=root, env=clean, capture_output=True, text=True, timeout=60)
    found = [finding["text"] for finding in json.loads(ran.stdout)["paths"][0]["findings"]]
    assert found == ([f"{name} {wanted}"] if wanted else []), f"{change.__name__}: {found}, not {wanted}"
    shutil.rmtree(root / change.__name__)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in CHANGES.items():
            write(Path(folder) / f"good.{name}", {name: model(name, 1)})
            for change in changes:
                verify(Path(folder), name, change)
        for change in (slabs_of_equal_elements, a_last_slab_like_the_first_element, a_constant):
            verify_copy(Path(folder), change)
    print("all are told as they are")


main()
