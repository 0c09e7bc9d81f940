"""A loop of one's own ends as it should: with 0, or with its exception, and never with a crash at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

DEADLINE_S = 300  # for one run, which took 34 s at a load of 15 on two cores

LOOP = """
import sys
import torch
import torch.distributed as dist
from launcher.engine import AdamW, Policy, Stepper, DDPOptions

torch.set_num_threads(1)
rank, world_size, folder, kind, ending = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
store = dist.FileStore(folder + "/store", world_size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
own_groups = kind in ("subgroup", "two Steppers")
ddp = {"shard": DDPOptions(shard_optimizer=True)}.get(kind)
if kind == "two Steppers, one group":
    ddp = DDPOptions(overlap=False)
steppers = []
for _ in range(2 if "two" in kind else 1):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    group = dist.new_group([0, 1]) if own_groups else dist.group.WORLD
    steppers.append(Stepper(model, AdamW(lr=3e-4), policy=Policy.fp16(), group=group, ddp=ddp))
for step in range(5):
    for stepper in steppers:
        inputs, labels = torch.randn(4, 8), torch.randint(3, (4,))
        with stepper.forward():
            logits = stepper.model(inputs).float()
        loss_sum = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        stepper.backward(loss_sum, len(labels))
        if ending == "exception" and step == 3:
            raise RuntimeError("of the loop")
        report = stepper.step().read()
if ending == "destroy":
    dist.destroy_process_group()
"""


def exit_codes(folder: Path, kind: str, ending: str) -> list[int]:
    """Of both ranks of one run."""
    folder.mkdir()
    words = [sys.executable, "-c", LOOP]
    processes = [
        subprocess.Popen(
            [*words, str(rank), "2", str(folder), kind, ending],
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


CASES = [
    ("world", "return"),
    ("world", "destroy"),
    ("world", "exception"),
    ("subgroup", "return"),
    ("shard", "return"),
    ("shard", "exception"),
    ("two Steppers", "return"),
    ("two Steppers", "exception"),
    ("two Steppers, one group", "return"),
]


@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("kind", "ending"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:3])]
)
def test_a_loop_ends_with_its_own_exit_code(kind, ending, tmp_path) -> None:
    assert exit_codes(tmp_path / "run", kind, ending) == [int(ending == "exception")] * 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "ending"), CASES)
def test_fifty_loops_end_with_their_own_exit_code(kind, ending, tmp_path) -> None:
    """Without a remedy a third of the runs end with SIGABRT."""
    codes = Counter(code for run in range(50) for code in exit_codes(tmp_path / str(run), kind, ending))
    assert codes == {int(ending == "exception"): 100}
