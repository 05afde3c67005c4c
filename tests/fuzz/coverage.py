#!/usr/bin/env python3
"""Counts the lines of its parser that the corpus of each fuzz target reaches.

usage: coverage.py BUILD [TARGET...]

BUILD was configured with -DFSDP_COVERAGE=ON, and holds the targets. The corpus is replayed from nothing,
one target at a time. Exit 1 when a target reaches less than WANTED percent; --lines shows what it misses.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys

WANTED = 80
HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Sources that are this target's to reach: what only it hands hostile bytes to.
PARSERS = {
    "config": "statedict/models/config statedict/expect/expect",
    "dcp": "formats/dcp/dcp_metadata formats/dcp/dcp_read",
    "deepspeed": "formats/deepspeed/deepspeed formats/deepspeed/deepspeed_flat "
                 "formats/deepspeed/deepspeed_model formats/deepspeed/deepspeed_optim "
                 "formats/deepspeed/deepspeed_plain formats/deepspeed/deepspeed_read "
                 "formats/deepspeed/deepspeed_resume",
    "derive": "statedict/derive/adapter statedict/derive/element_types statedict/derive/derived_product",
    "gguf": "formats/gguf/gguf_read formats/gguf/gguf_type",
    "gguf_tokens": "statedict/gguf_model/gguf_config statedict/gguf_model/gguf_tokenizer "
                   "formats/tokenizer/sentencepiece",
    "hdf5": "formats/hdf5_child/hdf5_session formats/hdf5_child/hdf5_listing",
    "index": "formats/native/native_index formats/native/native_read",
    "layouts": "formats/frameworks/framework_config formats/frameworks/framework_folder "
               "formats/frameworks/frameworks formats/safetensors/safetensors_tree",
    "llmc": "formats/llmc/llmc",
    "manifest": "statedict/manifest/manifest statedict/manifest/manifest_state_read "
                "statedict/manifest/manifest_value statedict/manifest/manifest_path",
    "map": "statedict/map/map_apply statedict/map/map_bindings statedict/map/map_file "
           "statedict/map/map_pattern statedict/map/map_size statedict/map/map_steps",
    "modules": "formats/frameworks/framework_modules",
    "npz": "formats/npy/npz_read",
    "plan": "statedict/convert/plan_read",
    "ranks": "formats/ranks/ranks formats/ranks/ranks_dist formats/ranks/ranks_flat "
             "formats/source/rank_names formats/ranks/ranks_read",
    "safetensors": "formats/safetensors/safetensors_header formats/safetensors/safetensors_read",
    "tokenizer": "formats/tokenizer/json_part formats/tokenizer/tokenizer_json "
                 "formats/tokenizer/tokenizer_rules runtime/tokens/tokenizer "
                 "runtime/tokens/tokenizer_read runtime/tokens/tokenize_lines runtime/tokens/added_tokens "
                 "runtime/tokens/merge runtime/tokens/split runtime/tokens/unicode runtime/tokens/vocab",
    "torch": "formats/pickle/pickle formats/pickle/pickle_nodes formats/pickle/pickle_policy "
             "formats/torch/torch_names formats/torch/torch_tensor formats/torch/torch_read "
             "formats/torch/torch_numpy formats/torch/torch_storage formats/torch/torch_zip",
    "zip": "formats/zip/zip",
}


def replay(build, target):
    for counts in build.rglob("*.gcda"):
        counts.unlink()
    run = subprocess.run([build / "tests" / f"fuzz_{target}", HERE / "corpus" / target],
                         capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"fuzz_{target} ended with {run.returncode}:\n{run.stdout}{run.stderr}")


def lines_of(build, source):
    """{line: whether it was reached} of one source; a macro's or an inlined copy counts once."""
    counts = next(build.rglob(f"{pathlib.Path(source).name}.c.gcda"), None)
    if counts is None:
        return None
    report = subprocess.run(["gcov", "-j", "-t", counts], capture_output=True, text=True, cwd=build)
    if report.returncode != 0:
        sys.exit(f"gcov cannot read {counts}; is {build} up to date?\n{report.stderr}")
    reached = {}
    for text in report.stdout.splitlines():
        for file in json.loads(text)["files"]:
            if file["file"].endswith(f"{source}.c"):
                for line in file["lines"]:
                    number = line["line_number"]
                    reached[number] = reached.get(number, False) or line["count"] > 0
    return reached


def measure(build, target, shows_lines):
    replay(build, target)
    parts, total, hit = [], 0, 0
    for source in PARSERS[target].split():
        lines = lines_of(build, source)
        name = pathlib.Path(source).name
        if lines is None:
            sys.exit(f"{target}: {source}.c was not compiled, or not reached at all")
        total += len(lines)
        hit += sum(lines.values())
        parts.append(f"{name} {100 * sum(lines.values()) // max(len(lines), 1)}")
        if shows_lines:
            show_missed(source, lines)
    percent = 100 * hit // total
    print(f"{target:<12} {percent:3} % of {total:4} lines  ({', '.join(parts)})", flush=True)
    return percent


def show_missed(source, lines):
    text = (ROOT / f"{source}.c").read_text().splitlines()
    for number, was_reached in sorted(lines.items()):
        if not was_reached:
            print(f"  {source}.c:{number}: {text[number - 1]}")


def main():
    options = argparse.ArgumentParser(description="lines of parsers that the fuzz corpora reach")
    options.add_argument("build", type=pathlib.Path)
    options.add_argument("targets", nargs="*", choices=[*PARSERS, []])
    options.add_argument("--lines", action="store_true", help="show the lines that are not reached")
    given = options.parse_args()
    if not shutil.which("gcov"):
        sys.exit("gcov is not installed")
    missing = {path.name for path in (HERE / "corpus").iterdir()} - set(PARSERS)
    if missing:
        sys.exit(f"coverage.py does not say which sources these parse with: {', '.join(missing)}")
    build = given.build.resolve()
    low = [target for target in given.targets or PARSERS
           if measure(build, target, given.lines) < WANTED]
    if low:
        print(f"below {WANTED} %: {', '.join(low)}", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
