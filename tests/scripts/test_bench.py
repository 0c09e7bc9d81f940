"""Each benchmark runs, measures what it says, and writes what it prints. No time is asserted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench import checkpoint, loop_recipe, shapes, step_cost, update
from scripts.bench.baselines import Batch, Disagreement
from scripts.bench.update_baselines import FlatStock, StockComposition

ROOT = Path(__file__).parents[2]
COMPILER = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, when imported


def run(program: str, *arguments: str, timeout_s: float = 110) -> str:
    finished = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / program), "--quick", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("model", shapes.MODELS)
def test_the_shapes_are_those_of_the_architecture(model) -> None:
    make, num_parameters = shapes.MODELS[model]
    assert sum(shape.numel() for shape in make().values()) == num_parameters


@pytest.mark.slow
def test_update_compares_all_contenders(tmp_path) -> None:
    file = tmp_path / "update.json"
    printed = run("update.py", "--groups", "--per-tensor", "--json", str(file))
    content = json.loads(file.read_text())
    assert [case["optimizer"] for case in content["rows"]] == ["adamw", "sgd"]
    assert {each["baseline"] for each in content["figures"]} == set(update.BASELINES.values())
    baselines = {"fused, per tensor", "fused, flat", "stock composition", "flat stock", "per tensor"}
    for case in content["rows"]:
        assert baselines | {"delivery alone", "ours", "ours, groups"} < set(case["rows"])
        assert all(name in printed and row["min_ms"] > 0 for name, row in case["rows"].items())
        assert case["rows"]["ours, groups"]["median_over_no_groups"] > 0
    assert {"cpu", "torch", "date"} <= set(content["machine"])
    assert content["n"] == 2


class Idle(StockComposition):
    """A contender that leaves the work out."""

    def step(self) -> None:
        pass


@pytest.mark.parametrize("optimizer", update.RULES)
def test_an_update_that_changes_the_weights_otherwise_ends_the_benchmark(optimizer) -> None:
    rule, tiny = update.RULES[optimizer], shapes.tiny_shapes()
    tiny = dict(sorted(tiny.items(), key=lambda item: len(item[1]), reverse=True))
    sizes = list(tiny.values())
    contenders = {
        "ours": update.Ours(tiny, rule.ours),
        "stock composition": StockComposition(sizes, optimizer, rule.torch_options),
        "flat stock": FlatStock(sizes, optimizer, rule.torch_options),
    }
    update.measure(contenders, repeats=2)
    update.refuse_other_weights(contenders, tiny)
    contenders["idle"] = Idle(sizes, optimizer, rule.torch_options)
    with pytest.raises(Disagreement, match="idle changes the weights otherwise than ours, by 100"):
        update.refuse_other_weights(contenders, tiny)


@pytest.mark.slow
def test_checkpoint_compares_steps_with_and_without_saving(tmp_path) -> None:
    file = tmp_path / "checkpoint.json"
    printed = run("checkpoint.py", "--json", str(file), "--directory", str(tmp_path))
    content = json.loads(file.read_text())
    assert content["rows"].keys() == {"1 rank, batch 16", "2 ranks, batch 16", "memory", "files"}
    assert all(key in printed for rows in content["rows"].values() for key in rows)
    assert len(content["figures"]) == 9
    assert list(tmp_path.iterdir()) == [file]


def windows_of(steps: list[float], written_after: int, window: int = 30) -> checkpoint.Windows:
    """Two windows of steps of 1 s, but for the first ones, and a copy of a quarter of a second in each."""
    seconds = [1.0] * (window - 1) + (steps + [1.0] * (window - len(steps))) * 3
    began = list(itertools.accumulate(seconds, initial=0.0))
    latest = [(step - written_after) // window * window for step in range(1, len(began) + 1)]
    times = {"began": began, "written": latest, "copies": [0.25] * 3}
    return checkpoint.Windows.of(times, window, 2)


def test_time_that_a_checkpoint_costs_is_in_the_figures_of_its_steps() -> None:
    """One second in the step that publishes, then half a second in one of those after it."""
    first = checkpoint.summary(windows_of([2.0], written_after=6))
    assert first["publishing_over_normal"] == 2
    assert first["publishing_without_copy_over_normal"] == 1.75
    assert first["written_s"] == 5
    later = windows_of([1.0, 1.0, 1.0, 1.5], written_after=6)
    rows = checkpoint.summary(later)
    assert rows["worst_of_ten_after_over_normal"] == rows["slowest_until_written_over_normal"] == 1.5
    assert rows["mean_until_written_over_normal"] == 1.1
    assert rows["worst_of_ten_normal_over_normal"] == 1
    figures = checkpoint.figures_of_windows("batch 64", later)
    assert [figure.value for figure in figures] == [0.75, 1.5, 1.1]


def test_a_write_that_waits_for_the_end_of_its_window_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="step 30 was not written in its window"):
        windows_of([2.0], written_after=29)


LOOP = loop_recipe.Settings("tensors", 0, block=3, rounds=2, steps_per_epoch=2, batch_size=8, file="")


def turns_of(settings, change=lambda model: None):
    """Both sides of the loop's benchmark, where a training step adds 1 to the weights."""

    def train(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1

    turns = loop_recipe.Turns(settings, lambda model: lambda: (train(model), change(model)))
    model = turns.build_model()
    for _ in range(settings.total_steps):
        turns.next_step()
        train(model)
    return turns


def test_launcher_and_loop_by_hand_take_turns_of_as_many_steps(tmp_path) -> None:
    settings = dataclasses.replace(LOOP, file=str(tmp_path / "times.json"))
    turns = turns_of(settings)
    assert json.loads((tmp_path / "times.json").read_text()) == turns.times
    for sides in turns.times.values():
        assert [len(seconds) for seconds in sides.values()] == [2, 2], "the first block is not counted"


def test_a_loop_by_hand_that_trains_otherwise_ends_the_benchmark(tmp_path) -> None:
    settings = dataclasses.replace(LOOP, file=str(tmp_path / "times.json"))
    numbers = iter(range(1000))

    def change(model) -> None:
        if next(numbers) == 4:  # in the second block
            next(model.parameters()).data[0, 0] += 1

    with pytest.raises(Disagreement, match="differ after step 6"):
        turns_of(settings, change)


@pytest.mark.slow
def test_loop_runs_the_launcher_beside_a_loop_by_hand(tmp_path) -> None:
    file = tmp_path / "loop.json"
    run("loop.py", "--json", str(file))
    content = json.loads(file.read_text())
    assert len(content["figures"]) == len(content["rows"]) == 6


@pytest.mark.slow
def test_plan_is_timed_beside_the_import_of_torch(tmp_path) -> None:
    file = tmp_path / "plan.json"
    run("plan.py", "--json", str(file))
    content = json.loads(file.read_text())
    assert content["rows"]["plan"]["median_ms"] > content["rows"]["import torch"]["median_ms"] > 0
    assert [each["promised"] for each in content["figures"]] == [5.0]


def test_a_side_that_stops_training_while_it_is_timed_ends_the_benchmark() -> None:
    sides = step_cost.sides_of("fp32", step_cost.mlp, ["raw"])
    batch, honest = step_cost.batch_of(), sides["raw"]
    losses: list[torch.Tensor] = []

    def stops(batch: Batch) -> torch.Tensor:
        if len(losses) < step_cost.CHECKED_STEPS:
            losses.append(honest(batch))
        return losses[-1]

    with pytest.raises(Disagreement, match="raw does not train as ours does"):
        step_cost.checked({**sides, "raw": stops}, batch, repeats=2, steps=5)


@pytest.mark.slow
def test_step_cost_compares_like_with_like(tmp_path) -> None:
    file = tmp_path / "step_cost.json"
    printed = run("step_cost.py", "--json", str(file))
    content = json.loads(file.read_text())
    for arithmetic in ("fp32", "native", "emulated"):
        rows = content["rows"][f"MLP, {arithmetic}"]
        assert {"ours", "raw"} <= rows.keys()
        assert all(row["aten_calls"] > 20 and row["median_ms"] > 0 for row in rows.values())
    assert content["rows"]["8 and 40 tensors, fp32"]["ours, many"]["us_per_further_tensor"]
    assert {each["baseline"] for each in content["figures"]} >= {"raw", "raw, many"}
    assert "CPU time of a small step, fp32 arithmetic" in printed


@pytest.mark.slow
def test_precision_step_compares_with_ddp_on_two_ranks(tmp_path) -> None:
    file = tmp_path / "precision_step.json"
    program = str(ROOT / "scripts" / "bench" / "precision_step.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, program, "--quick", "--batch", "4", "--json", str(file)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environ, capture_output=True, timeout=110)
    content = json.loads(file.read_text())
    rows = content["rows"]
    assert {
        "ours, fp32",
        "ours, fp16",
        "ddp + GradScaler, fp32",
        "ddp + GradScaler, fp32, 1 MB",
    } < rows.keys()
    sizes = {name: row["state_bytes_per_parameter"] for name, row in rows.items() if name.startswith("ours")}
    assert all(16 <= sizes[f"ours, {policy}"] < 16.5 for policy in ("fp32", "fp16", "bf16")), sizes
    assert 14 <= sizes["ours, amp_fp16"] < 14.5, "weights that are the masters"
    assert {each["promised"] for each in content["figures"]} == {None, 1.1, 1.3, 16.5}


@pytest.mark.slow
def test_launch_times_both_sides_and_both_events(tmp_path) -> None:
    file = tmp_path / "launch.json"
    printed = run("launch.py", "--json", str(file))
    content = json.loads(file.read_text())
    assert [case["event"] for case in content["rows"]] == ["start", "restart", "answer"]
    for case in content["rows"][:2]:
        assert case["rows"].keys() == {"launcher", "torchrun", "ratio"}
        assert all(value > 0 for row in case["rows"].values() for value in row.values())
        assert f"{case['event']} to first all-reduce, 2 ranks" in printed
    assert content["rows"][2]["rows"].keys() == {"help", "config error"}
    assert {"cpu", "torch", "date"} <= set(content["machine"])
