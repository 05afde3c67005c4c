"""Plants the bugs of the list next to this file, one at a time, and runs the tests that must fail.

run.py [--new] [--table] [ROOM, FILE or NAME...]   plants those bugs, or all; ./dev mutants calls it
    --new     only those that were not caught yet as they are in the list now
    --table   then writes the table of docs/reliability.md
run.py --check BUILD [FEATURE...]                  checks the list itself: a check of the source

A bug that `requires` a feature, such as cuda, has tests only in builds that have it.

A mutant is found once in its file, compiles, and its tests pass without it: anything else is an error,
not "caught". The tree is a copy in build-mutants/, so that the checkout stays as it is.
"""

import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "build-mutants"
TREE = WORK / "tree"
RESULTS = WORK / "results.json"
PAGE = ROOT / "docs/reliability.md"
JOBS = str(os.cpu_count() or 2)
KEYS = {"name", "file", "before", "after", "tests"}
OPTIONAL = {"requires", "sanitize", "cannot_matter"}
# Seconds that a test may take that declares no longer time: some bugs make it wait for ever.
TIMEOUT = 60


class Wrong(Exception):
    """The list, the copy or its unmutated tests are wrong, so that no result would mean anything."""


def read_list():
    mutants = []
    for path in sorted(HERE.glob("*.toml")):
        for mutant in tomllib.loads(path.read_text()).get("mutant", []):
            unknown = mutant.keys() - KEYS - OPTIONAL
            missing = KEYS - mutant.keys()
            if unknown or missing:
                raise Wrong(f"{path.name}: '{mutant.get('name')}': unknown {sorted(unknown)}, "
                            f"missing {sorted(missing)}")
            if not mutant["file"].startswith(path.stem + "/"):
                raise Wrong(f"{path.name}: '{mutant['name']}' is in {mutant['file']}")
            mutants.append(mutant)
    names = [mutant["name"] for mutant in mutants]
    for name in set(names):
        if names.count(name) > 1:
            raise Wrong(f"two mutants are named '{name}'")
    return mutants


def room_of(mutant):
    return os.path.dirname(mutant["file"])


def planted(mutant, root):
    """The text of the mutant's file, without the bug and with it."""
    path = root / mutant["file"]
    text = path.read_text() if path.exists() else ""
    found = text.count(mutant["before"])
    if found != 1:
        raise Wrong(f"'{mutant['name']}': {mutant['file']} has its text {found} times, not once")
    if mutant["before"] == mutant["after"]:
        raise Wrong(f"'{mutant['name']}': changes nothing")
    return text, text.replace(mutant["before"], mutant["after"])


def tests_in(build):
    """Every CTest of a build: its name, and what has to be built for it."""
    shown = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], check=True,
                           capture_output=True, text=True).stdout
    shown = json.loads(shown[shown.index("{"):])
    graph = shown["backtraceGraph"]
    tests = {}
    for test in shown["tests"]:
        node = graph["nodes"][test["backtrace"]]
        while "parent" in node and "command" in graph["nodes"][node["parent"]]:
            node = graph["nodes"][node["parent"]]
        listed = pathlib.Path(graph["files"][node["file"]]).parent
        program = test.get("command", [""])[0]
        if program.startswith(str(build) + "/"):
            targets = [os.path.relpath(program, build)]
        else:  # a script: the tools, and what its folder builds
            targets = ["tools/all", os.path.relpath(listed, TREE) + "/all"]
        tests[test["name"]] = targets
    return tests


def matching(mutant, tests):
    found = [name for name in tests if re.search(mutant["tests"], name)]
    if not found:
        raise Wrong(f"'{mutant['name']}': no test matches '{mutant['tests']}'")
    return found


def check(build, features):
    tests = tests_in(pathlib.Path(build))
    mutants = read_list()
    wrong = []
    for mutant in mutants:
        looks = [lambda: planted(mutant, ROOT)]
        if mutant.get("requires") in (None, *features):
            looks.append(lambda: matching(mutant, tests))
        for look in looks:
            try:
                look()
            except Wrong as error:
                wrong.append(str(error))
    rooms = re.findall(r"^\| `([a-z0-9_/]+)` \| (\d+) \|", PAGE.read_text(), re.M)
    shown = {room: int(count) for room, count in rooms}
    for room in sorted({room_of(mutant) for mutant in mutants} | shown.keys()):
        count = sum(room_of(mutant) == room for mutant in mutants)
        if shown.get(room, 0) != count:
            wrong.append(f"docs/reliability.md: {room} has {count} mutants, not {shown.get(room, 0)}: "
                         "./dev mutants --table")
    print("\n".join(wrong) or f"{len(mutants)} mutants can be planted")
    return 1 if wrong else 0


def copy_tree():
    """Copies the files that differ and that git does not ignore, so that only they are compiled again."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-coz", "--exclude-standard"], check=True,
                            capture_output=True, text=True).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for old in TREE.rglob("*"):
        if not old.is_dir() and str(old.relative_to(TREE)) not in names:
            old.unlink()
    for name in names:
        source, copy = ROOT / name, TREE / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
            copy.chmod(source.stat().st_mode)


def build_dir(mutant):
    return WORK / ("asan" if mutant.get("sanitize") else "plain")


def compile_targets(build, targets):
    """True when it compiled; the compiler's first error otherwise goes to stdout."""
    done = subprocess.run(["cmake", "--build", build, "--parallel", JOBS, "--target", *targets],
                          capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "error" in line]
        print("\n".join(line[:200] for line in errors[:3] or done.stdout.splitlines()[-3:]))
    return done.returncode == 0


def prepare(build):
    options = ["-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG", "-DFSDP_WARNINGS_AS_ERRORS=OFF",
               f"-DFSDP_TEST_TIMEOUT={TIMEOUT}"]
    if build.name == "asan":
        options.append("-DFSDP_SANITIZE=address,undefined")
    print(f"==> build: {build.relative_to(ROOT)}", flush=True)
    subprocess.run(["cmake", "-S", TREE, "-B", build, "-G", "Ninja", *options], check=True,
                   stdout=subprocess.DEVNULL)
    if not compile_targets(build, ["all"]):
        raise Wrong("the tree does not compile without a bug")


def run_tests(build, names, *options):
    """The tests that failed, and those that did not run."""
    pattern = "^(" + "|".join(re.escape(name) for name in names) + ")$"
    done = subprocess.run(["ctest", "--test-dir", build, "--parallel", JOBS, "-R", pattern,
                           *options], capture_output=True, text=True).stdout
    failed = re.findall(r"Test +#\d+: (\S+) [.]*\*\*\*(?!Skipped|Not Run)", done)
    idle = re.findall(r"Test +#\d+: (\S+) [.]*\*\*\*(?:Skipped|Not Run)", done)
    return failed, idle


def check_unmutated(build, mutants, tests):
    names = sorted({name for mutant in mutants for name in matching(mutant, tests)})
    print(f"==> {len(names)} tests without a bug", flush=True)
    failed, idle = run_tests(build, names)
    failed = run_tests(build, failed)[0] if failed else []  # alone: the first run may have been slow
    if failed:
        raise Wrong("these fail without a bug: " + ", ".join(failed))
    for mutant in mutants:
        if set(matching(mutant, tests)) <= set(idle):
            raise Wrong(f"'{mutant['name']}': its tests do not run on this machine")


def plant(mutant, tests):
    """Plants one bug. Returns "caught" or "survived"."""
    build = build_dir(mutant)
    names = matching(mutant, tests)
    path = TREE / mutant["file"]
    text, bug = planted(mutant, TREE)
    begun = time.monotonic()
    path.write_text(bug)
    try:
        if not compile_targets(build, sorted({target for name in names for target in tests[name]})):
            raise Wrong(f"'{mutant['name']}' does not compile")
        failed, _ = run_tests(build, names, "--stop-on-failure")
    finally:
        path.write_text(text)
    spent = time.monotonic() - begun
    reason = mutant.get("cannot_matter")
    if failed:
        print(f"{mutant['file']}: {mutant['name']}: caught by {failed[0]} in {spent:.1f} s", flush=True)
    else:
        print(f"{mutant['file']}: {mutant['name']}: "
              + (f"survived: {reason}" if reason else "SURVIVED"), flush=True)
    if failed and reason:
        raise Wrong(f"'{mutant['name']}' was caught, so that it matters")
    return "caught" if failed else "survived"


def key_of(mutant):
    return json.dumps([mutant[key] for key in ("file", "before", "after", "tests")])


def known_results():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_table(mutants):
    results = known_results()
    unknown = [mutant["name"] for mutant in mutants if key_of(mutant) not in results]
    if unknown:
        raise Wrong("plant these first: " + "; ".join(unknown))
    lines = ["| room | planted | caught | survived |", "|---|---|---|---|"]
    caught = 0
    for room in sorted({room_of(mutant) for mutant in mutants}):
        here = [mutant for mutant in mutants if room_of(mutant) == room]
        left = [mutant for mutant in here if results[key_of(mutant)] != "caught"]
        caught += len(here) - len(left)
        reasons = "; ".join(f"{mutant['name']}: {mutant.get('cannot_matter', 'no test fails')}"
                            for mutant in left)
        lines.append(f"| `{room}` | {len(here)} | {len(here) - len(left)} | {reasons or '0'} |")
    lines.append(f"| all | {len(mutants)} | {caught} | {len(mutants) - caught} |")
    begin, end = "<!-- mutants: ./dev mutants --table -->\n", "<!-- end of mutants -->"
    page = PAGE.read_text()
    head, rest = page.split(begin)
    PAGE.write_text(head + begin + "\n".join(lines) + "\n" + rest[rest.index(end):])


def selected(mutants, words):
    def fits(mutant, word):
        return (mutant["file"].startswith(word.rstrip("/") + "/") or mutant["file"].endswith(word)
                or word in mutant["name"])

    chosen = [mutant for mutant in mutants if not words or any(fits(mutant, word) for word in words)]
    if not chosen:
        raise Wrong(f"no mutant is in or named {' '.join(words)}")
    return chosen


def end_on_signals():
    """Ends by an exception, so that plant() takes its bug out, and its compiler or test is killed."""
    def end(number, _):
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def main(arguments):
    if arguments[:1] == ["--check"]:
        return check(arguments[1], arguments[2:])
    mutants = read_list()
    chosen = selected(mutants, [word for word in arguments if word not in ("--table", "--new")])
    if "--new" in arguments:
        results = known_results()
        chosen = [mutant for mutant in chosen if results.get(key_of(mutant)) != "caught"]
    end_on_signals()
    WORK.mkdir(exist_ok=True)
    lock = open(WORK / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Wrong("another run is under way") from None
    copy_tree()
    tests, wrong, survivors = {}, 0, 0
    for build in sorted({build_dir(mutant) for mutant in chosen}):
        prepare(build)
        tests[build] = tests_in(build)
        here = [mutant for mutant in chosen if build_dir(mutant) == build]
        left_out = [mutant for mutant in here if "requires" in mutant
                    and not any(re.search(mutant["tests"], name) for name in tests[build])]
        for mutant in left_out:
            print(f"'{mutant['name']}' is left out: this machine has no {mutant['requires']}")
            chosen.remove(mutant)
        check_unmutated(build, [mutant for mutant in here if mutant not in left_out], tests[build])
    for mutant in chosen:
        try:
            result = plant(mutant, tests[build_dir(mutant)])
        except Wrong as error:
            print(f"error: {error}", flush=True)
            wrong += 1
            continue
        survivors += result == "survived" and "cannot_matter" not in mutant
        RESULTS.write_text(json.dumps({**known_results(), key_of(mutant): result}))
    if "--table" in arguments:
        write_table(mutants)
    print(f"{len(chosen)} planted, {survivors} survived without a reason, {wrong} errors")
    return 1 if survivors or wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Wrong as error:
        sys.exit(f"mutants: {error}")
