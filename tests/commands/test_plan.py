"""`plan`: what it says of a run, and of recipes that are hard to foresee."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.distributed.links import ring_bytes
from launcher.plan.page import lines_of

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


def test_a_model_that_fits_on_no_gpu_is_said(capsys) -> None:
    found = planned(capsys, *WORDS)
    sizes = [0, 1024]
    gpus = [{**gpu, "micro_batch": size} for gpu, size in zip(found["gpus"], sizes, strict=False)]
    page = "\n".join(lines_of({**found, "gpus": gpus}))
    assert f"{gpus[0]['name']:<18}does not fit" in page
    assert page.count("1 024") == 1


def own(tmp_path: Path, device: str = "cpu", line: str = "pass") -> tuple[str, ...]:
    file = tmp_path / "own.py"
    file.write_text(OWN.format(device=device, line=line))
    return ("plan", "recipe=cnn", "recipe.uses=own", f"recipes.path={file}", "data.batch_size=16")


def test_a_plan_has_steps_memory_and_bytes_sent_and_starts_nothing(capsys, tmp_path) -> None:
    found = planned(capsys, *WORDS)
    assert found["world_size"] == 2
    assert found["steps"] == found["steps_per_epoch"] * 3
    assert found["memory"]["total"] == sum(found["memory"]["bytes"].values())
    assert all(0 < gpu["micro_batch"] <= found["samples"] for gpu in found["gpus"])
    assert found["wire"]["sent_by_each_rank"] == found["wire"]["bytes"], "2 (n - 1) / n of them, of 2 ranks"
    assert found["wire"]["buckets"] >= 1
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_several_machines_has_the_ranks_of_all(capsys) -> None:
    words = ["launch.nnodes=2"]
    one, two = (planned(capsys, *WORDS, *more) for more in (["launch.nnodes=1"], words))
    assert (two["world_size"], two["machines"]) == (4, 2)
    assert two["micro_batch"] == one["micro_batch"] // 2
    assert two["wire"]["sent_by_each_rank"] == round(ring_bytes(two["wire"]["bytes"], 4))
    assert cli.main([*WORDS, *words]) == 0
    assert "cnn on 4 CPUs of 2 machines" in capsys.readouterr().out
    assert cli.main([*WORDS, *words, "data.batch_size=3"]) == 2
    assert "less than the number of ranks, 4" in " ".join(capsys.readouterr().err.split())


def test_a_plan_says_what_shares_by_speed_would_gain(capsys) -> None:
    words = [*WORDS, "data.batch_size=64"]
    assert planned(capsys, *words)["shares"] is None
    assert planned(capsys, *words, "--rates=3,1")["shares"] == {"samples": [48, 16], "times_as_fast": 2.0}
    assert cli.main([*words, "data.share=[48,16]", "--rates", "1,1"]) == 0
    assert "48, 16 samples by rank, 0.67 times as fast as equal shares" in capsys.readouterr().out
    assert cli.main([*words, "--rates", "3"]) == 2
    assert "--rates: must be a number above 0 for each of the 2 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_names_what_the_values_are(capsys) -> None:
    assert cli.main([*WORDS]) == 0
    page = capsys.readouterr().out
    for words in (
        "nothing is started",
        "learning rate",
        "masters",
        "T4 16 GB",
        "free at",
    ):
        assert words in page


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("batch", [2, 3, 4, 5, 7])
def test_a_small_batch_that_batch_norm_can_train_is_planned(capsys, tmp_path, batch) -> None:
    """A half of it may be one sample, whose deviation is none."""
    words = own(tmp_path)
    file = tmp_path / "own.py"
    layers = "nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))"
    file.write_text(file.read_text().replace("nn.Linear(8, 3, device='cpu')", layers))
    found = planned(capsys, *words[:-1], f"data.batch_size={batch}", "launch.nproc=1", "train.max_steps=2")
    assert (found["micro_batch"], found["measured_because"]) == (batch, "")
    assert {gpu["micro_batch"] for gpu in found["gpus"]} == {64}, "all samples"


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("device", ["'cuda'", "'cuda:1'", "0", "torch.device('cuda', 0)", "torch.device(1)"])
def test_a_model_that_allocates_on_a_gpu_is_planned_without_one(capsys, tmp_path, device) -> None:
    words = own(tmp_path, line=f"x = x.to({device})")
    file = tmp_path / "own.py"
    file.write_text(file.read_text().replace("device='cpu'", f"device={device}"))
    found = planned(capsys, *words)
    assert (found["parameters"], found["measured_because"]) == (27, "")


def test_a_condition_on_a_tensor_is_said_to_be_taken_as_false(capsys, tmp_path) -> None:
    assert cli.main(own(tmp_path, line="x = x * 2 if (x > 0).all() else x")) == 0
    assert "1 condition on tensors taken as false" in capsys.readouterr().out


@pytest.mark.slow
def test_a_forward_pass_that_depends_on_values_is_measured_for_real(capsys, tmp_path) -> None:
    found = planned(capsys, *own(tmp_path, line="x = x * 2 if float(x.sum()) > 0 else x"))
    assert found["measured_because"] == "DataDependentError: it reads the value of a tensor"
    assert found["memory"]["bytes"]["activations"] > 0


def test_a_fault_of_the_model_has_the_traceback_of_the_real_pass_alone(capsys, tmp_path) -> None:
    assert cli.main(own(tmp_path, line="raise ValueError('a fault')")) == 1
    said = capsys.readouterr().err
    assert said.count("Traceback") == 1
    assert "in forward: ValueError: a fault" in said


def test_data_that_are_not_there_are_the_error_of_the_run(capsys) -> None:
    assert cli.main(["plan", "recipe=gpt", "data.path=nowhere.txt"]) == 2
    assert "nowhere.txt: there is no such file" in capsys.readouterr().err


def test_a_plan_of_a_sweep_is_refused(capsys) -> None:
    assert cli.main([*WORDS, "-m"]) == 2
    assert "plan -m: plan is about one run" in capsys.readouterr().err


def test_a_model_that_does_not_fit_its_data_is_one_sentence(capsys, tmp_path) -> None:
    words = own(tmp_path)
    file = tmp_path / "own.py"
    file.write_text(file.read_text().replace("nn.Linear(8, 3", "nn.Linear(9, 3"))
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "layer, Linear(in_features=9, out_features=3, bias=True), was given [16, 8]" in said
    assert "Traceback" not in said
