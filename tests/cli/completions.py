"""The shells complete every option of --help, and with a real bash, fish and zsh what a user gets.

usage: completions.py BUILD        zsh and fish are tried where they are installed
"""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

BUILD = Path(sys.argv[1]).resolve()
FOLDER = BUILD / "completions"
TOOLS = sorted(path.name for path in (BUILD / "bin").glob("fsdp-*"))
ENVIRONMENT = {**os.environ, "PATH": f"{BUILD}/bin:{os.environ['PATH']}", "LC_ALL": "C.UTF-8", "TERM": "dumb",
               "HISTFILE": "/dev/null"}
PATIENCE = 60

# Text before the tab -> text after it, in a directory with only step-00000100/.
TYPED = {
    "fsdp-ls --conf": "fsdp-ls --config",
    "fsdp-ls --sort na": "fsdp-ls --sort name",
    "fsdp-ls --sort=si": "fsdp-ls --sort=size",
    "fsdp-inspect --incl": "fsdp-inspect --include",
    "fsdp-verify --re": "fsdp-verify --repair",
    "fsdp-diff --map st": "fsdp-diff --map step-00000100",
    "fsdp-gc --keep-l": "fsdp-gc --keep-last",
    "fsdp-plot --outp": "fsdp-plot --output",
    "fsdp-convert --to safe": "fsdp-convert --to safetensors",
    "fsdp-convert st": "fsdp-convert step-00000100",
    "fsdp-train --optim.weight": "fsdp-train --optim.weight_decay",
    "fsdp-bench ch": "fsdp-bench check",
    "fsdp-bench make --model mo": "fsdp-bench make --model moe",
    "fsdp-convert --include st": "fsdp-convert --include st",
}


def fail(text):
    print(text)
    sys.exit(1)


def printed_by(command, **how):
    return subprocess.run(command, check=True, capture_output=True, text=True, **how).stdout


def check_options():
    count = 0
    for tool in TOOLS:
        text = printed_by([BUILD / "bin" / tool, "--help"])
        options = re.findall(r"^  (?:-(\w), |    )--([a-z_.-]+)", text, re.MULTILINE)
        if len(options) < 5:
            fail(f"{tool} --help lists only {options}")
        bash = (FOLDER / "bash" / tool).read_text()
        zsh = (FOLDER / "zsh" / f"_{tool}").read_text()
        fish = (FOLDER / "fish" / f"{tool}.fish").read_text()
        for letter, name in options:
            name = re.escape(name)
            found = (re.search(rf"[ ']--{name}[ ']", bash), re.search(rf"--{name}[=\[}}]", zsh),
                     re.search(rf" -l {name} ", fish))
            if not all(found):
                fail(f"{tool}: --{name} is not in all three: {found}")
            if letter and not (f" -{letter} " in bash and f"-{letter}" in zsh and f" -s {letter} " in fish):
                fail(f"{tool}: -{letter} is not in all three")
            count += 1
    print(f"{len(TOOLS)} tools, {count} options in all three")


def read_until(terminal, end):
    """The output of a program on its terminal, up to and with `end`."""
    printed, deadline = "", time.monotonic() + PATIENCE
    while end not in printed:
        if time.monotonic() > deadline or not select.select([terminal], [], [], PATIENCE)[0]:
            fail(f"nothing ends with {end!r} in {printed!r}")
        printed += os.read(terminal, 4096).decode(errors="replace")
    return printed


def type_into(shell, setup, directory, before_tab):
    """The line that stands there after a tab. A shell echoes it when a printf is put before it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(directory)
        os.execvpe(shell[0], shell, ENVIRONMENT)
    os.write(terminal, f"{setup}; PS1=; printf '%s-%s\\n' set up\n".encode())
    read_until(terminal, "set-up")
    os.write(terminal, (before_tab + "\t").encode())
    time.sleep(0.3)                                  # a tab and what follows it must not be read in one go
    os.write(terminal, b"\x01printf '<%s>' \x05\nprintf '%s-%s\\n' the end\n")
    printed = read_until(terminal, "the-end")
    os.close(terminal)
    os.waitpid(pid, 0)
    return " ".join(re.findall(r"<([^>]*)>", printed.split("\n", 1)[1]))


def check_typed(name, shell, setup, directory):
    for before_tab, wanted in TYPED.items():
        got = type_into(shell, setup, directory, before_tab)
        if got.rstrip("/") != wanted:
            fail(f"{name}: {before_tab!r} became {got!r}, not {wanted!r}")
    return f"{name}: {len(TYPED)} lines completed"


def check_bash(directory):
    for tool in TOOLS:
        script = FOLDER / "bash" / tool
        shown = printed_by(["bash", "-c", f"source '{script}' && complete -p {tool}"])
        if not re.fullmatch(rf"complete -F _\w+ {tool}\n", shown):
            fail(f"bash does not know {tool}: {shown}")
    setup = "bind 'set bell-style none'; bind 'set enable-bracketed-paste off'; "
    setup += "; ".join(f"source '{FOLDER}/bash/{tool}'" for tool in TOOLS)
    return check_typed("bash", ["bash", "--norc", "--noprofile", "-i"], setup, directory)


def check_zsh(directory):
    for tool in TOOLS:
        subprocess.run(["zsh", "-n", FOLDER / "zsh" / f"_{tool}"], check=True)
    setup = f"bindkey -e; unsetopt zle_bracketed_paste beep; fpath=('{FOLDER}/zsh' $fpath); "
    setup += "autoload -Uz compinit; compinit -u -D"
    return check_typed("zsh", ["zsh", "-f", "-i", "+o", "prompt_sp"], setup, directory)


def check_fish(directory):
    for tool in TOOLS:
        subprocess.run(["fish", "--no-execute", FOLDER / "fish" / f"{tool}.fish"], check=True)
    for before_tab, wanted in TYPED.items():
        tool = before_tab.split()[0]
        command = f"source '{FOLDER}/fish/{tool}.fish'; complete -C '{before_tab}'"
        printed = printed_by(["fish", "--private", "-c", command], cwd=directory, env=ENVIRONMENT)
        offered = [line.split("\t")[0].rstrip("/") for line in printed.splitlines()]
        last = wanted.split(" ")[-1]
        if wanted == before_tab:
            if offered:
                fail(f"fish: {before_tab!r} offers {offered}")
        elif last not in offered:
            fail(f"fish: {before_tab!r} offers {offered}, not {last!r}")
    return f"fish: {len(TYPED)} lines completed"


CHECKS = {"bash": check_bash, "zsh": check_zsh, "fish": check_fish}


def check_shell(name, directory):
    """The problems that the check of a shell finds; None without the shell."""
    return CHECKS[name](directory) if shutil.which(name) else None


def main():
    check_options()
    with tempfile.TemporaryDirectory() as directory:
        os.mkdir(os.path.join(directory, "step-00000100"))
        with ProcessPoolExecutor(3) as shells:   # they wait for what is typed
            tried = {name: shells.submit(check_shell, name, directory) for name in CHECKS}
            said = {name: done.result() for name, done in tried.items()}
    print("\n".join(text or f"{name} is not installed: ./dev setup does that" for name, text in said.items()))
    if None in said.values():
        sys.exit(77)


main()
