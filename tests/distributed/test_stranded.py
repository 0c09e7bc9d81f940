"""What a failed worker leaves behind for a torchrun that waits for a machine which is gone."""

from __future__ import annotations

import os
import subprocess

from launcher.distributed import stranded

OF_TORCHRUN = {
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}


def test_a_kernel_without_pidfd_open_changes_no_exit_code(monkeypatch) -> None:
    """A traceback took the place of the worker's exit code."""
    started: list[object] = []

    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(args))
    stranded.watch(OF_TORCHRUN)
    assert len(started) == 1
    monkeypatch.setattr(os, "pidfd_open", refuse)
    stranded.watch(OF_TORCHRUN)
    assert len(started) == 1
