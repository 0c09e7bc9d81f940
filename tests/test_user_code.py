"""The traceback on the console: from the user's first line to the line that raised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from launcher.recipe import cross_entropy
from launcher.user_code import short_traceback, user_location


def raised_by(code: Callable[[], object], kind: type[Exception]) -> Exception:
    """The error, without the frame of this function."""
    with pytest.raises(kind) as caught:
        code()
    assert caught.tb.tb_next is not None
    return caught.value.with_traceback(caught.tb.tb_next)


def places(trace: str) -> list[str]:
    """File and function of each frame."""
    return [f"{file} {name}" for file, name in re.findall(r'File ".*?([^/"]+)", line \d+, in (\S+)', trace)]


class Network(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, torch.ones(3, 5))


def test_frames_between_the_users_lines_are_left_out() -> None:
    batch = {"image": torch.ones(2, 4), "label": torch.zeros(2, dtype=torch.int64)}

    def loss() -> object:
        return cross_entropy(Network(), batch)

    trace = short_traceback(raised_by(loss, RuntimeError))
    own = "test_user_code.py"
    assert places(trace) == [f"{own} loss", f"{own} forward"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "    return nn.functional.linear(x, torch.ones(3, 5))\n" in trace
    assert trace.splitlines()[-1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_the_line_that_raised_is_shown_whoever_wrote_it() -> None:
    def loss() -> object:
        return cross_entropy(nn.Linear(4, 3), {"image": torch.ones(2, 4)})

    assert places(short_traceback(raised_by(loss, KeyError))) == [
        "test_user_code.py loss",
        "contract.py cross_entropy",
    ]


def test_an_error_of_no_line_of_the_users_begins_where_the_job_does() -> None:
    error = raised_by(lambda: json.loads("{"), ValueError)
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert places(short_traceback(error))[0] == "__init__.py loads"


def test_the_errors_that_led_to_it_are_shown_alike() -> None:
    def read() -> None:
        try:
            cross_entropy(nn.Linear(4, 3), {})
        except KeyError as error:
            raise ValueError("a bad batch") from error

    trace = short_traceback(raised_by(read, ValueError))
    assert trace.count("Traceback (most recent call last)") == 2
    assert "direct cause of the following exception" in trace
    assert places(trace)[-1] == "test_user_code.py read"


def test_the_built_in_recipes_of_a_wheel_are_the_users(tmp_path, monkeypatch) -> None:
    package = tmp_path / "site-packages" / "launcher"
    monkeypatch.setattr("launcher.user_code.PACKAGE", package)
    monkeypatch.setattr("launcher.user_code.recipes_dir", lambda: package / "recipes")
    code: dict[str, Callable[[], object]] = {}
    for file, source in (
        ("engine/step.py", "def step(work): work()"),
        ("recipes/built_in.py", "def forward(): 1 / 0\n\ndef loss(): step(forward)"),
        ("data/reader.py", "def read(): loss()"),
    ):
        exec(compile(source, str(package / file), "exec"), code)
    error = raised_by(code["read"], ZeroDivisionError)
    assert user_location(error) == f"{package}/recipes/built_in.py:1, in forward"
    assert places(short_traceback(error)) == ["built_in.py loss", "built_in.py forward"]
