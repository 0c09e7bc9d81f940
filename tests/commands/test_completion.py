"""Completion of `python -m launcher` in a real bash."""

from __future__ import annotations

import os
import pty
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.config.test_composition import OWN_RECIPE, own_tree
from tests.limits import at_most
from tests.telemetry.tracker.test_wandb_session import ROOT
from tests.test_cli import WATCHED, ask

# For each of the lines what bash offers, in one line; a shell that completes several installs once.
ASK = """
eval "$("$1" -m launcher -sc install=bash)"
complete -p python > /dev/null || exit 9
for line in "${@:2}"; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_WORDS=($line) COMPREPLY=()
    [[ $line == *' ' ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _launcher_complete "$1" "${COMP_WORDS[COMP_CWORD]}"
    echo "${COMPREPLY[@]}"
done
"""
OFFERED = {
    "-m launcher recipe=res": ["recipe=resnet", "recipe=resnet101", "recipe=resnet152"],
    "-m launcher recipe=resnet18 optim.weight": ["optim.weight_decay="],
    "-m launcher --config-dir own recipe=mi": ["recipe=mine"],
    "-m launcher recipe=cnn optim.gr": ["optim.groups="],
    "-m launcher recipe=resnet18 optim=adamw optim.be": ["optim.betas="],
    "-m launcher recipe=resnet18 optim=adamw optim.betas.": [],
    "-m launcher recipe=resnet18 optim=adamw optim.betas=": [],
    "-m launcher -m recipe=resnet18 precision=amp_f": ["precision=amp_fp16"],
    "-m launcher report --best recipe=nothing": [],
    "-m other recipe=res": [],
    "-m launcher re": ["recipes", "report"],
    "-m launcher ne": ["new"],
    "-m launcher seed=1 rep": [],
    "-m launcher report ": [],
    "-m launcher --config-dir o": [],
    "-m launcher recipe=resnet18 data.path=ow": ["data.path=own"],
}


INSTALL = 'eval "$(python -m launcher -sc install=bash)"'
# As bash-completion, which loads that of a command where it is needed.
OWN = """
_own() { COMPREPLY=($(compgen -W "--alpha" -- "$2")); }
_completion_loader() { complete -F _own "$1"; }
"""


def typed(lines: Iterable[str], prepare: str, directory: Path) -> list[str]:
    """What each of the lines is after a TAB at its end, in one interactive bash that has run `prepare`."""
    answers = directory / "answers"
    answers.unlink(missing_ok=True)
    parent, child = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=child,
        stdout=child,
        stderr=child,
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(child)
    (directory / "prepare").write_text(prepare)
    try:
        # Ctrl-A and Ctrl-E go to the beginning and to the end of the line.
        keys = ["source prepare", *(f"{line}\t\x01printf '%s\\n' '\x05' >> answers" for line in lines)]
        for number, each in enumerate([*keys, "exit"]):
            os.write(parent, f"{each}\n".encode())
            deadline = time.monotonic() + at_most(30)
            while number and number < len(keys) and count_of_lines(answers) < number:
                assert time.monotonic() < deadline, each
                if select.select([parent], [], [], 0.02)[0]:
                    os.read(parent, 65536)
        shell.wait(at_most(30))
    finally:
        shell.kill()
        shell.wait()
        os.close(parent)
    return answers.read_text().splitlines()


def count_of_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
def test_each_line_of_a_shell_is_completed(tmp_path: Path) -> None:
    lines = ["python -m launcher recipe=resnet10", "python -m launcher recipe=resnet15"]
    assert typed(lines, INSTALL, tmp_path) == [
        "python -m launcher recipe=resnet101",
        "python -m launcher recipe=resnet152",
    ]


@pytest.mark.slow
def test_other_lines_of_python_are_completed_as_before(tmp_path: Path) -> None:
    """By the completion that the user has; where there is none, as bash completes any command."""
    for name in ("file.py", "my file.py", "my file.txt"):
        (tmp_path / name).touch()
    others = {
        "python file.py --a": "python file.py --alpha ",
        "python3 -m launcher recipe=resnet10": "python3 -m launcher recipe=resnet101",
        "python3 file.py --a": "python3 file.py --alpha ",
    }
    assert typed(others, OWN + 2 * f"{INSTALL}\n", tmp_path) == [*others.values()]
    of_bash = {
        "python fi": "python file.py ",
        "python3 $SHLV": "python3 $SHLVL ",
        "python m": "python my\\ file.",
    }
    assert typed(of_bash, INSTALL, tmp_path) == [*of_bash.values()]


@pytest.mark.slow
def test_values_after_an_equals_sign_are_completed_in_any_line(tmp_path: Path) -> None:
    (tmp_path / "file.py").touch()
    lines = {
        "cat --out=fi": "cat --out=file.py ",
        "python x.py --out=fi": "python x.py --out=file.py ",
        "python -m launcher recipe=resnet10": "python -m launcher recipe=resnet101",
        "python -m launcher recipe=resnet18 optim=": "python -m launcher recipe=resnet18 optim=",
        "python -m launcher data.path=fi": "python -m launcher data.path=file.py",
        "python -m launcher optim.mome": "python -m launcher optim.momentum=",
    }
    assert typed(lines, INSTALL, tmp_path) == [*lines.values()]


@pytest.mark.slow
def test_after_an_uninstall_the_completion_is_that_of_before(tmp_path: Path) -> None:
    lines = {
        "python file.py --a": "python file.py --alpha ",
        "python3 file.py --a": "python3 file.py --alpha ",
        "python -m launcher rec": "python -m launcher rec",
    }
    removal = INSTALL.replace("install", "uninstall")
    assert typed(lines, f"{OWN}{INSTALL}\n{removal}", tmp_path) == [*lines.values()]


def completed(lines: Iterable[str], directory: Path) -> list[list[str]]:
    """What bash offers for each of the lines, whose first word is this Python."""
    done = subprocess.run(
        [
            "bash",
            "--norc",
            "-c",
            ASK,
            "bash",
            sys.executable,
            *(f"{sys.executable} {line}" for line in lines),
        ],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.split("\n")[:-1]]


@pytest.mark.slow
def test_bash_offers_what_may_follow(tmp_path: Path) -> None:
    own_tree(tmp_path / "own", OWN_RECIPE)
    for (line, offered), found in zip(OFFERED.items(), completed(OFFERED, tmp_path), strict=True):
        assert found[: len(offered)] == offered, line
        assert bool(found) == bool(offered), line


def test_an_answer_is_quick_and_imports_no_torch(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COMP_LINE", "launcher recipe=res")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = ask(["-sc", "query=bash"], tmp_path, WATCHED)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 5, "half a second; of the processor, whatever else runs"
    assert done.returncode == 0
    assert "recipe=resnet18" in done.stdout.split()
    assert "torch" not in done.stderr.split()
    assert list(tmp_path.iterdir()) == []
