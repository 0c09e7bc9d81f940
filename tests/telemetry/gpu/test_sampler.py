"""The sampler on the real nvidia-ml-py with a stand-in for the driver's library, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.harness import run_ranks
from tests.telemetry.gpu.stepped import sampled

FIRST = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
SECOND = "GPU-bbbbbbbb-0000-0000-0000-000000000000"


class Sampled:
    def __init__(self, records: list[Mapping[str, Any]], joules: float | None) -> None:
        self.joules = joules
        self.gpu = [record for record in records if record["event"] == "gpu"]
        self.warnings = [record["text"] for record in records if record["event"] == "warning"]
        self.decisions = [record["text"] for record in records if record["event"] == "decision"]


def sampled_on(env: object, plan: Mapping[str, Any], *arguments: Any) -> Any:
    return sampled(*arguments, **plan)


@pytest.fixture
def sample(library: Path, tmp_path: Path):
    def run(words: str = "", uuids=(FIRST, SECOND), visible: str | None = None, **plan: Any) -> Sampled:
        file = tmp_path / "words"
        file.write_text(words)
        standin = None if plan.pop("no_library", False) else library / "libnvidia-ml.so.1"
        (found,) = run_ranks(1, sampled_on, plan, standin, file, visible, uuids)
        return Sampled(*found)

    return run


def test_two_gpus_are_measured_between_logged_steps(sample) -> None:
    found = sample()
    assert found.warnings == []
    assert len(found.gpu) >= 3
    assert all(0 < record["step"] <= 30 for record in found.gpu)
    assert found.gpu[-1]["step"] == 30, "the last interval is in it"
    whole = found.gpu[1]
    assert whole["power_w"] == pytest.approx(300)
    assert whole["energy_j"] == pytest.approx(300 * whole["seconds"], rel=1e-3), "counted in whole mJ"
    assert (whole["memory_bytes"], whole["temperature_c"]) == (2000, 61)
    assert whole["utilisation_percent"] == 80.5
    first, second = whole["gpus"]
    assert (first["index"], first["uuid"], first["ecc_errors"]) == (0, FIRST, 0)
    assert second["uuid"] == SECOND
    assert "ecc_errors" not in second, "unsupported there"


def test_energy_is_that_of_the_run(sample) -> None:
    found = sample()
    assert found.joules == pytest.approx(1000 + sum(record["energy_j"] for record in found.gpu))
    assert found.gpu[-1]["run_energy_j"] == pytest.approx(found.joules)


def test_the_gpus_of_ranks_on_other_nodes_are_not_measured(sample) -> None:
    found = sample(uuids=(SECOND, "GPU-ffffffff-0000-0000-0000-000000000000"), steps=8)
    assert [gpu["index"] for gpu in found.gpu[0]["gpus"]] == [1]


@pytest.mark.parametrize(
    ("visible", "uuids", "indices"),
    [
        (" 1, 2", (None, None), [1]),
        pytest.param(SECOND, (None,), [1], marks=pytest.mark.slow),
        pytest.param(None, (None,), [0, 1], marks=pytest.mark.slow),
        ("1,0", (SECOND.removeprefix("GPU-"), FIRST.removeprefix("GPU-")), [1, 0]),
    ],
)
def test_gpus_are_those_of_the_ranks_in_their_order_or_those_that_are_visible(
    sample, visible, uuids, indices
) -> None:
    found = sample(visible=visible, uuids=uuids, steps=8)
    assert [gpu["index"] for gpu in found.gpu[-1]["gpus"]] == indices
    assert [gpu["uuid"] for gpu in found.gpu[-1]["gpus"]] == [(FIRST, SECOND)[index] for index in indices]


def test_an_old_driver_leaves_fields_out_and_energy_is_integrated(sample) -> None:
    found = sample("old hot0", steps=20)
    assert found.gpu[1]["energy_j"] == pytest.approx(300 * found.gpu[1]["seconds"])
    assert "throttled_s" not in found.gpu[-1]["gpus"][0]


def test_a_gpu_that_lowers_its_clocks_is_a_warning_once(sample) -> None:
    (warning,) = sample("hot0").warnings
    assert f"GPU 0 ({FIRST}, rank 0) lowers its clocks (hw_thermal" in warning


@pytest.mark.parametrize(
    ("missing", "absent"),
    [
        ("NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP", "sw_power_cap"),
        ("NVML_VOLATILE_ECC", "ecc_errors"),
        ("nvmlDeviceGetFieldValues", "throttled_s"),
    ],
)
def test_another_version_of_the_library_costs_only_what_it_lacks(sample, missing, absent) -> None:
    found = sample(steps=12, without=[missing])
    assert found.warnings == []
    first = found.gpu[-1]["gpus"][0]
    assert absent not in first
    wanted = {"power_w", "energy_j", "throttled_s", "ecc_errors"}
    assert wanted - {absent} <= first.keys()


def test_uncorrected_errors_of_the_memory_are_reported(sample) -> None:
    (before,) = sample("ecc0", steps=12).warnings
    assert f"GPU 0 ({FIRST}, rank 0) has 3 uncorrected ECC errors since the driver was loaded" in before
    (during,) = sample(at=15, then="ecc0").warnings
    assert "has 3 uncorrected ECC errors since the driver was loaded" in during


def test_of_a_gpu_that_vanishes_nothing_is_known_from_then_on(sample) -> None:
    found = sample(at=15, then="lost1")
    assert found.gpu[0]["gpus"][1].keys() > {"index", "uuid"}
    assert found.gpu[-1]["gpus"][1] == {"index": 1, "uuid": SECOND}
    assert found.gpu[-1]["gpus"][0]["power_w"] == 100
    assert found.gpu[-1]["step"] == 30


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"words": "nodriver"}, marks=pytest.mark.slow),
        {"no_library": True},
        pytest.param({"uuids": ("GPU-ffff",)}, marks=pytest.mark.slow),
    ],
)
def test_without_a_driver_a_warning_says_that_nothing_is_measured(sample, plan) -> None:
    found = sample(**plan, steps=3)
    assert (found.gpu, found.decisions, found.joules) == ([], [], None)
    (warning,) = found.warnings
    assert "NVML cannot be used, so the GPUs are not measured" in warning
