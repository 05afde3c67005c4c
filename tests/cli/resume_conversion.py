"""A conversion that is killed by SIGKILL and gone on with gives the bytes of an undisturbed one, and what it
had written is not written again; SIGTERM with --resume keeps what is done and exits 75.

The killed one is stopped where it is known to have done something: pieces are noted in DST.tmp-UUID/.resume.
usage: resume_conversion.py BUILD
"""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUILD = Path(sys.argv[1]).resolve()
TARGETS = {"x.safetensors": [], "x.pt": [], "x.npz": [], "hf": ["--max-shard-size", "6M"],
           "dcp": ["--to", "dcp", "--world-size", "3", "--shard-dim", "1"],
           "ours": ["--to", "fsdp", "--world-size", "4"],
           "packed": ["--to", "fsdp", "--world-size", "4", "--compress", "zstd"],
           "cast.safetensors": ["--dtype", "f8e4m3", "--on-overflow", "clamp"],
           "cast": ["--to", "fsdp", "--world-size", "4", "--dtype", "f8e4m3", "--on-overflow", "clamp"],
           "wider.pt": ["--dtype", "f64", "--dtype-for", "t03=f16"]}
# In a slow build one of each kind: a container, a directory of them, files of ranks.
STOPPED = ("x.safetensors", "hf", "dcp", "ours") if "FSDP_TEST_FEWER" in os.environ else TARGETS
left_out = []
whole_casts = {}  # what a conversion that nobody disturbs does to values
# 24 MiB take a tenth of a second, so that no machine is done before a conversion can be stopped.
SLOWLY = ["--bwlimit", "200M"]
TENSORS, ROWS, COLUMNS = 12, 512, 1024


def put_source(path):
    header, size = {}, ROWS * COLUMNS * 4
    for i in range(TENSORS):
        header[f"t{i:02}"] = {"dtype": "F32", "shape": [ROWS, COLUMNS],
                              "data_offsets": [i * size, (i + 1) * size]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i in range(TENSORS):
            file.write(b"".join(struct.pack("<f", i + j / 4096) for j in range(4096)) * (size // 16384))


def put_many(path):
    """So many tensors that the lines after a conversion of them take some time."""
    header = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(12000)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(header)))


def put_digests(root):
    """From now on the source is checked before it is converted."""
    subprocess.run([BUILD / "bin/fsdp-verify", "--write-digests", "-q", "s.safetensors"], cwd=root,
                   check=True)


def command(directory, name, *more):
    return [BUILD / "bin/fsdp-convert", "s.safetensors", f"{directory}/{name}", *TARGETS[name], "--jobs", "1",
            "--mem", "8M", "--no-sync", *more]


def notes(root):
    """Bytes in the notes of what is at work, or None when there is nothing yet."""
    sizes = [path.stat().st_size for path in root.glob("*.tmp-*/.resume")]
    return sizes[0] if sizes else None


def start_and_wait(root, name, wanted, *more):
    process = subprocess.Popen(command("cut", name, *SLOWLY, *more), cwd=root, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
    while process.poll() is None:
        try:
            if (notes(root / "cut") or 0) >= wanted:
                break
        except FileNotFoundError:
            pass
        time.sleep(0.0005)
    return process


def files(path):
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def resume(root, name):
    done = subprocess.run(command("cut", name, "--resume", "--json"), cwd=root, capture_output=True,
                          text=True)
    assert done.returncode == 0, (name, done)
    assert json.loads(done.stdout).get("cast") == whole_casts.get(name), (name, done.stdout, whole_casts)
    assert files(root / "cut" / name) == files(root / "whole" / name), name
    assert os.listdir(root / "cut") == [name], os.listdir(root / "cut")
    assert "resuming" in done.stderr, done.stderr
    return int(re.search(r"(\d+) bytes existed already", done.stderr).group(1))


def kill_early(root, name, wanted):
    """Killed once so many bytes are noted; False when it was done by then, or had removed its notes, which is
    the last thing that it does before it publishes."""
    process = start_and_wait(root, name, wanted)
    process.kill()
    talk = process.communicate()[1].decode()
    assert process.returncode in (0, -signal.SIGKILL), (name, process.returncode, talk)
    if not (root / "cut" / name).exists() and notes(root / "cut") is not None:
        return True
    subprocess.run(["rm", "-r", root / "cut"], check=True)
    (root / "cut").mkdir()
    return False


def kill(root, name, wanted):
    """The number of bytes that were kept, or None when it was done before."""
    if not kill_early(root, name, wanted):
        return None
    kept = resume(root, name)
    subprocess.run(["rm", "-r", root / "cut" / name], check=True)
    return kept


def kill_at_moments(root, name):
    done = subprocess.run(command("whole", name, "--json"), cwd=root, check=True, capture_output=True)
    whole_casts[name] = json.loads(done.stdout).get("cast")
    casts = whole_casts[name] is not None
    native = name in ("ours", "packed", "cast")
    record, count = (40, 4) if native else (16, TENSORS)
    record += 40 if casts else 0
    saved = []
    for part in (0, count // 2, count):
        saved.append(tried(kill, root, name, 96 + record * part))
    print(name, "kept", saved)
    whole = sum(map(len, files(root / "whole" / name).values()))
    assert saved[2] is None or saved[2] > whole / 2, (saved, whole)


def stop(root, name):
    process = start_and_wait(root, name, 97, "--resume")
    process.send_signal(signal.SIGTERM)
    talk = process.communicate()[1].decode()
    was_stopped = process.returncode != 0
    if was_stopped:
        assert process.returncode == 75 and "--resume continues it" in talk, (process.returncode, talk)
        assert resume(root, name) > 0
    subprocess.run(["rm", "-r", root / "cut" / name], check=True)
    return was_stopped or None


def stop_again(root, name):
    """SIGTERM at any moment of a conversion that continues with another one's work, which stays."""
    if not kill_early(root, name, 97):
        return None
    for stopped, delay in enumerate((0.005, 0.02, 0.04)):
        process = subprocess.Popen(command("cut", name, *SLOWLY, "--resume"), cwd=root,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        if (root / "cut" / name).exists():  # done before the signal came
            assert files(root / "cut" / name) == files(root / "whole" / name), name
            subprocess.run(["rm", "-r", root / "cut" / name], check=True)
            return stopped or None
        assert process.returncode in (75, -signal.SIGTERM), process.returncode
    assert resume(root, name) > 0, name
    subprocess.run(["rm", "-r", root / "cut" / name], check=True)
    return True


def stop_one_file(root):
    """Nothing is kept of a file of HDF5, and nobody says so."""
    TARGETS["x.h5"] = []
    process = subprocess.Popen(command("cut", "x.h5", *SLOWLY, "--resume"), cwd=root,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not list((root / "cut").glob("*.tmp-*/result")):
        time.sleep(0.0005)
    process.send_signal(signal.SIGTERM)
    talk = process.communicate()[1].decode()
    assert "conversion to format fsdp-file cannot be resumed" in talk, talk
    if process.returncode == 0:
        (root / "cut/x.h5").unlink()
        return None
    assert process.returncode == 128 + signal.SIGTERM, (process.returncode, talk)
    assert "continues it" not in talk, talk
    assert os.listdir(root / "cut") == [], os.listdir(root / "cut")
    return True


def stop_when_done(root, *more):
    """SIGTERM once DST is there, while the tool makes its last lines: it has done its work, and says so."""
    process = subprocess.Popen([BUILD / "bin/fsdp-convert", "many.safetensors", "cut/many.pt", "--no-sync",
                                *more], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (root / "cut/many.pt").exists():
        time.sleep(0.0002)
    process.send_signal(signal.SIGTERM)
    told = process.communicate()
    assert process.returncode == 0 and "ok" in told[0], (process.returncode, told)
    (root / "cut/many.pt").unlink()


def tried(what, root, *arguments):
    """Again when a conversion was done before it was stopped; left out, when that is so every time."""
    for _ in range(5):
        found = what(root, *arguments)
        if found is not None:
            return found
    left_out.append(f"{what.__name__} {arguments}")
    return None


with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
    root = Path(directory)
    (root / "whole").mkdir()
    (root / "cut").mkdir()
    put_source(root / "s.safetensors")
    for name in TARGETS:
        kill_at_moments(root, name)
    for name in STOPPED:
        tried(stop, root, name)
    put_digests(root)
    for name in STOPPED:
        tried(stop_again, root, name)
    tried(stop_one_file, root)
    put_many(root / "many.safetensors")
    for more in ["--resume"], []:
        stop_when_done(root, *more)
if left_out:
    print("left out, since the conversion was done before it was stopped:", *left_out)
    sys.exit(77)
