"""A Slurm whose squeue does not answer, with programs of its names in the place of Slurm."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from launcher.errors import PreflightError
from launcher.sweep.launchers import slurm
from launcher.sweep.state import SweepJob
from tests.configs import composed
from tests.sweep.launchers.jobs import ended, follow


def test_a_sweep_hears_signals_while_squeue_fails_and_ends_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in slurm.COMMANDS:
        (tmp_path / name).write_text('#!/bin/sh\n[ ! -e "$0.silent" ] || { echo no answer >&2; exit 1; }\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    submitit = ModuleType("submitit")

    class Executor(SimpleNamespace):
        def update_parameters(self, **parameters: object) -> None: ...

        def submit(self, *command: object) -> SimpleNamespace:
            return SimpleNamespace(job_id="7")

    submitit.SlurmExecutor = lambda folder: Executor()  # type: ignore[attr-defined]
    submitit.core = SimpleNamespace(utils=SimpleNamespace(FailedJobError=ValueError))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "submitit", submitit)
    monkeypatch.setattr(slurm, "EVERY_S", 0.0)
    monkeypatch.setattr(slurm, "RETRY_S", 0.2)
    job = SweepJob(0, "0", ())
    with slurm.SlurmLauncher(composed().sweep) as launcher:
        launcher.submit(job, tmp_path / "sweep" / "0")
        (tmp_path / "squeue.silent").touch()
        began = time.monotonic()
        assert launcher.poll(0.1) == []
        assert launcher.poll(0.01) == []
        assert time.monotonic() - began < 0.2 * slurm.TRIES / 2, "one try in a poll"
        assert not launcher.has_capacity(job)
        with pytest.raises(PreflightError, match=r"squeue fails: no answer\. .* accepted run on") as caught:
            follow(launcher, ended(0), [])
    assert f"-m sweep.resume={tmp_path / 'sweep'}" in str(caught.value)
    assert capsys.readouterr().err.count("no answer") == 1, "the first is told"
