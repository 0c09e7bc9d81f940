"""`plan`: what it says of a run and of a sweep, and of recipes that are hard to foresee."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.commands import sweep
from launcher.distributed.links import StepSeconds, ring_bytes, wire_seconds
from launcher.plan.forecast import makespan
from launcher.supervisor import worker_count

OWN = """
import torch
from torch import nn
from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3, device={device!r})

    def forward(self, x):
        {line}
        return self.layer(x)

@recipe("own")
def own(config: Config) -> Recipe:
    data = TensorData({{"image": torch.randn(64, 8), "label": torch.arange(64) % 3}})
    return Recipe(Net, data, data, cross_entropy, classes=("a", "b", "c"))
"""
WORDS = ("plan", "recipe=cnn", "data=digits", "launch.nproc=2")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def own(tmp_path: Path, device: str = "cpu", line: str = "pass") -> tuple[str, ...]:
    file = tmp_path / "own.py"
    file.write_text(OWN.format(device=device, line=line))
    return ("plan", "recipe=cnn", "recipe.uses=own", f"recipes.path={file}", "data.batch_size=16")


def test_a_plan_has_steps_memory_wire_and_files_and_starts_nothing(capsys, tmp_path) -> None:
    found = planned(capsys, *WORDS, "--samples-per-s", "1000", "--link", "100", "--ranks", "4")
    assert found["world_size"] == 2
    assert found["steps"] == found["steps_per_epoch"] * 3
    assert 60 <= len(found["schedule"]["rates"]) <= 61
    assert found["memory"]["total"] == sum(found["memory"]["bytes"].values())
    assert all(gpu["micro_batch"] > 0 for gpu in found["gpus"])
    step = StepSeconds(*(found["step_s"][part] for part in ("forward", "backward", "update")))
    assert step.total == pytest.approx(found["batch_size"] / 2 / 1000)
    wire_s = wire_seconds(ring_bytes(found["wire"]["bytes"], 4), 100)
    (link,) = found["links"]
    assert (link["wire_s"], link["step_s"]) == (wire_s, step.over(wire_s, found["wire"]["buckets"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "pet"), [(["launch.nnodes=2"], ""), ([], "2"), (["launch.nnodes=2"], "3")])
def test_a_plan_of_several_machines_has_the_ranks_of_all(capsys, monkeypatch, words, pet) -> None:
    monkeypatch.setenv("PET_NNODES", pet)
    one, two = (
        planned(capsys, *WORDS, "--samples-per-s", "9", *more) for more in (["launch.nnodes=1"], words)
    )
    assert (two["world_size"], two["machines"]) == (4, 2)
    assert two["micro_batch"] == one["micro_batch"] // 2
    assert two["wire"]["sent_by_each_rank"] == round(ring_bytes(two["wire"]["bytes"], 4))
    assert two["here_s"] is None, "the link between the machines is not known"
    assert one["here_s"] is not None
    assert cli.main([*WORDS, *words]) == 0
    assert "cnn on 4 CPUs of 2 machines" in capsys.readouterr().out
    assert cli.main([*WORDS, *words, "data.batch_size=3"]) == 2
    assert "less than the number of ranks, 4" in " ".join(capsys.readouterr().err.split())


def test_ranks_are_measured_with_the_cores_that_they_have_on_their_machine(capsys, monkeypatch) -> None:
    threads: list[str] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(
        "launcher.plan.forecast.exchanged",
        lambda kinds, seconds, environ, program: threads.append(environ["OMP_NUM_THREADS"]) or "silence",
    )
    assert cli.main([*WORDS, "launch.nnodes=4", "--measure"]) == 3
    assert threads == ["8"]


def test_the_plan_of_a_sweep_on_several_machines_is_refused_as_the_sweep(capsys) -> None:
    assert cli.main([*WORDS, "-m", "seed=0,1", "launch.nnodes=2"]) == 2
    assert "launch.nnodes with -m: a sweep runs on one machine" in capsys.readouterr().err


def test_the_jobs_of_a_sweep_need_a_sample_for_each_of_their_own_devices(capsys, monkeypatch) -> None:
    for module in (worker_count, sweep):
        monkeypatch.setattr(module, "visible_gpus", lambda: tuple(f"GPU-{number}" for number in range(8)))
    found = planned(capsys, "plan", "recipe=cnn", "data=digits", "-m", "seed=0,1", "data.batch_size=4")
    assert [job["devices"] for job in found["sweep"]["jobs"]] == [1, 1]


def test_steps_of_one_rank_are_measured_here_and_leave_no_files(capsys, tmp_path) -> None:
    words = own(tmp_path, line="assert not x.is_cuda")
    before = sorted(tmp_path.iterdir())
    found = planned(capsys, *words, "launch.nproc=2", "--measure", "--link", "100", "--ranks", "4")
    parts = [found["step_s"][part] for part in ("forward", "backward", "update")]
    assert min(parts) > 0
    assert found["step_s"]["total"] == pytest.approx(sum(parts))
    (link,) = found["links"]
    wire = found["wire"]
    cpu_s = ring_bytes(wire["bytes"], 4) * wire["cpu_s_per_byte"]
    assert cpu_s > 0
    assert link["step_s"] == StepSeconds(*parts).over(link["wire_s"], wire["buckets"], cpu_s)
    assert sorted(tmp_path.iterdir()) == before


def test_without_overlap_the_whole_wire_follows_the_backward_pass(capsys) -> None:
    words = (*WORDS, "wire.overlap=false", "--samples-per-s", "1000", "--link", "1", "--ranks", "4")
    found = planned(capsys, *words)
    (link,) = found["links"]
    assert found["wire"]["buckets"] > 1
    assert link["step_s"] == pytest.approx(found["step_s"]["total"] + link["wire_s"])


def test_a_plan_of_one_rank_foretells_several_with_the_buckets_that_they_send(capsys, tmp_path) -> None:
    words = (*own(tmp_path), "--samples-per-s", "1000", "--link", "100", "--ranks", "2")
    file = tmp_path / "own.py"
    layers = (
        "nn.Sequential(nn.Linear(8, 1024), *(nn.Linear(1024, 1024) for _ in range(4)), nn.Linear(1024, 3))"
    )
    file.write_text(file.read_text().replace("nn.Linear(8, 3, device='cpu')", layers))
    one, two = (planned(capsys, *words, f"launch.nproc={ranks}") for ranks in (1, 2))
    assert one["wire"]["buckets"] == two["wire"]["buckets"] > 2


def test_the_page_names_what_the_values_are(capsys) -> None:
    assert cli.main([*WORDS, "--link", "2500", "--ranks", "16"]) == 0
    page = capsys.readouterr().out
    for words in (
        "nothing is started",
        "learning rate",
        "masters",
        "T4 16 GB",
        "2.5 Gbit      16",
        "free at",
    ):
        assert words in page


def test_a_sweep_has_its_jobs_in_order_with_their_device_hours(capsys) -> None:
    words = (*WORDS, "-m", "optim.lr=0.1,0.2", "train.epochs=1,2", "--samples-per-s", "100")
    sweep = planned(capsys, *words)["sweep"]
    assert [job["overrides"][-2:] for job in sweep["jobs"]] == [
        [f"optim.lr={lr}", f"train.epochs={epochs}"] for lr in (0.1, 0.2) for epochs in (1, 2)
    ]
    hours = [job["device_hours"] for job in sweep["jobs"]]
    assert hours[1] == 2 * hours[0] > 0
    assert sweep["device_hours"] == pytest.approx(sum(hours))
    assert sweep["hours"] == pytest.approx(sum(hours) / 2)  # on two devices each, one at a time


def test_the_page_of_a_sweep_says_what_is_of_its_first_job_and_where_its_files_are(capsys) -> None:
    assert cli.main([*WORDS, "-m", "optim.lr=0.1,0.2", "--samples-per-s", "100"]) == 0
    page = capsys.readouterr().out
    for words in ("job 0 of the sweep", "at the rate of job 0", "in multirun/cnn/<time>-<4 hex>/<job>:"):
        assert words in page


def test_the_schedule_has_its_highest_rate(capsys) -> None:
    rates = planned(capsys, *WORDS, "optim.lr=0.3", "schedule=cosine", "train.max_steps=394")["schedule"][
        "rates"
    ]
    assert max(rate for _, rate in rates) == 0.3


def test_a_search_has_the_shape_of_a_trial_and_their_number(capsys) -> None:
    words = (*WORDS, "-m", "sweep=random", "optim.lr=interval(0.1,0.2)", "--samples-per-s", "100")
    sweep = planned(capsys, *words, "sweep.stop.trials=5")["sweep"]
    assert (sweep["search"], sweep["trials"], len(sweep["jobs"])) == ("random", 5, 1)
    assert sweep["device_hours"] == pytest.approx(5 * sweep["jobs"][0]["device_hours"])
    endless = planned(capsys, *words, "sweep.stop.trials=null")["sweep"]
    assert (endless["trials"], endless["device_hours"]) == (None, None)


def test_jobs_start_in_order_as_soon_as_a_place_is_free() -> None:
    assert makespan([3.0, 1.0, 1.0, 2.0], 2) == 4.0
    assert makespan([], 2) == 0.0


@pytest.mark.parametrize("device", ["'cuda'", "'cuda:1'", "0", "torch.device('cuda', 0)", "torch.device(1)"])
def test_a_model_that_allocates_on_a_gpu_is_planned_without_one(capsys, tmp_path, device) -> None:
    words = own(tmp_path, line=f"x = x.to({device})")
    file = tmp_path / "own.py"
    file.write_text(file.read_text().replace("device='cpu'", f"device={device}"))
    found = planned(capsys, *words)
    assert (found["parameters"], found["measured_because"]) == (27, "")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("assert x.sum().item() < 1e9", "ValueNeeded: it reads the value of a tensor"),
        ("assert not x.is_meta", "AssertionError"),
    ],
)
def test_why_a_model_is_measured_is_one_line(capsys, tmp_path, line, reason) -> None:
    assert planned(capsys, *own(tmp_path, line=line))["measured_because"] == reason


def test_a_condition_on_a_tensor_is_said_to_be_taken_as_false(capsys, tmp_path) -> None:
    assert cli.main(own(tmp_path, line="x = x * 2 if (x > 0).all() else x")) == 0
    assert "1 condition on tensors taken as false" in capsys.readouterr().out


def test_a_forward_pass_that_depends_on_values_is_measured_for_real(capsys, tmp_path) -> None:
    found = planned(capsys, *own(tmp_path, line="x = x * 2 if float(x.sum()) > 0 else x"))
    assert found["measured_because"] == "ValueNeeded: it reads the value of a tensor"
    assert found["memory"]["bytes"]["activations"] > 0


def test_a_loop_that_ends_at_a_value_is_measured_for_real(capsys, tmp_path) -> None:
    found = planned(capsys, *own(tmp_path, line="while not x.abs().max() < 1e-3: x = x / 2"))
    assert found["measured_because"] == "ValueNeeded: it reads the value of a tensor"


def test_a_fault_of_the_model_has_the_traceback_of_the_real_pass_alone(capsys, tmp_path) -> None:
    assert cli.main(own(tmp_path, line="raise ValueError('a fault')")) == 1
    said = capsys.readouterr().err
    assert said.count("Traceback") == 1
    assert "in forward: ValueError: a fault" in said


def test_a_model_that_ends_the_program_is_named(capsys, tmp_path) -> None:
    assert cli.main(own(tmp_path, line="raise SystemExit(3)")) == 1
    assert "called sys.exit(3)" in capsys.readouterr().err


def test_data_that_are_not_there_are_the_error_of_the_run(capsys) -> None:
    assert cli.main(["plan", "recipe=gpt", "data.path=nowhere.txt"]) == 2
    assert "nowhere.txt: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--link", "fast"],
        ["--ranks", "2.5"],
        ["--samples-per-s", "0"],
        ["--samples-per-s", "1,2"],
        ["--samples-per-s", "100", "--measure"],
    ],
)
def test_a_number_that_is_none_is_refused(words, capsys, message) -> None:
    assert cli.main([*WORDS, *words]) == 2
    message(capsys.readouterr().err)


def test_a_model_that_does_not_fit_its_data_is_one_sentence(capsys, tmp_path) -> None:
    words = own(tmp_path)
    file = tmp_path / "own.py"
    file.write_text(file.read_text().replace("nn.Linear(8, 3", "nn.Linear(9, 3"))
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "layer, Linear(in_features=9, out_features=3, bias=True), was given [16, 8]" in said
    assert "Traceback" not in said


def test_what_the_engine_cannot_train_is_refused_as_by_a_run(capsys, tmp_path) -> None:
    words = own(tmp_path)
    file = tmp_path / "own.py"
    file.write_text(
        file.read_text().replace("nn.Linear(8, 3, device='cpu')", "nn.EmbeddingBag(8, 3, sparse=True)")
    )
    assert cli.main(words) == 2
    assert "layer of Net has sparse=True" in capsys.readouterr().err


def test_ranks_that_cannot_exchange_end_a_measurement_with_what_they_said(
    capsys, tmp_path, monkeypatch, message
) -> None:
    monkeypatch.setattr("launcher.plan.forecast.exchanged", lambda *given: "no answer within 90 s")
    assert cli.main([*own(tmp_path), "--measure"]) == 3
    message(capsys.readouterr().err)
