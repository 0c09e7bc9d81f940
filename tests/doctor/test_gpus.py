"""What is said of each GPU, by a stand-in for NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.doctor import gpus
from launcher.doctor.findings import FAILURE, OK, WARNING, Finding
from launcher.os.cuda_driver import Driver
from launcher.telemetry.gpu.devices import Gpu

CARD = Gpu(0, "GPU-a", object())
HEALTHY = {
    "Name": "Tesla T4",
    "MemoryInfo": SimpleNamespace(free=15.5e9, total=16e9, used=0.1e9),
    "ComputeRunningProcesses": [],
    "TotalEccErrors": 0,
}


class NVMLError(Exception):
    pass


def nvml(**answers: Any) -> Any:
    """A module that answers as a healthy card does, but for `answers`; an exception is raised."""

    def asked(answer: Any) -> Any:
        def call(*arguments: object) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    calls = {f"nvmlDeviceGet{name}": asked(answer) for name, answer in (HEALTHY | answers).items()}
    names = ("CLOCK_SM", "CLOCK_MEM", "MEMORY_ERROR_TYPE_UNCORRECTED", "VOLATILE_ECC", "TEMPERATURE_GPU")
    constants = {f"NVML_{name}": number for number, name in enumerate(names)}
    calls["nvmlInit"] = asked(None)
    return SimpleNamespace(**calls, **constants, NVMLError=NVMLError, NVML_SUCCESS=0)


def wrong(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.verdict != OK]


def test_a_healthy_card_is_ok() -> None:
    assert not wrong([*gpus.state(nvml(), CARD)])
    (about, *_) = gpus.state(nvml(), CARD)
    assert about.value == "Tesla T4, 15.5 of 16.0 GB free"


@pytest.mark.parametrize(
    ("answers", "verdict", "says"),
    [
        ({"ComputeRunningProcesses": [SimpleNamespace(pid=7)]}, WARNING, "1 other process of this GPU"),
        ({"MemoryInfo": SimpleNamespace(free=8e9, total=16e9, used=8e9)}, WARNING, "Something of this GPU"),
        ({"TotalEccErrors": 3}, FAILURE, "3 uncorrected ECC errors"),
    ],
)
def test_a_fault_of_a_card_is_found(answers, verdict, says) -> None:
    (found,) = wrong([*gpus.state(nvml(**answers), CARD)])
    assert found.verdict == verdict
    assert says in found.sentence


def test_a_card_that_supports_nothing_has_no_fault() -> None:
    deaf = nvml(**dict.fromkeys(HEALTHY, NVMLError("Not Supported")))
    assert [each.value for each in gpus.state(deaf, CARD)] == ["deaf"]
    assert not wrong([*gpus.state(deaf, CARD)])


def test_cards_without_fp16_or_bf16_hardware_say_so() -> None:
    turing, pascal, ampere = (
        gpus.arithmetic(0, SimpleNamespace(major=major, minor=minor))
        for major, minor in ((7, 5), (6, 1), (8, 0))
    )
    assert ("no bf16" in turing.value, turing.verdict) == (True, OK)
    assert pascal.verdict == WARNING
    assert "bf16" not in ampere.value


def test_a_variable_that_shows_no_gpu_is_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "ask_driver", Driver)
    for shown, verdict in (("7", WARNING), ("", OK), ("-1", OK)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        (found,) = gpus.kernels()
        assert found.verdict == verdict


def test_gpus_with_a_torch_for_the_cpu_are_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "ask_driver", lambda: Driver(0, 2, (12, 4)))
    monkeypatch.setattr(gpus, "refuse_unusable_driver", lambda *_: None)
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = gpus.kernels()
    assert (found.verdict, "2 GPUs" in found.value) == (WARNING, True)
