"""A compiler that does not work, or gives other values: the update is the plain one, with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, ParameterGroup, Policy, Scaling, Stepper, TorchOptimizer
from launcher.engine.flat.layout import Layout
from launcher.engine.optim.compilation import Compilation, _compare_judgements, _Wrong
from launcher.engine.verdict import Terms
from tests.engine.observe import deciding_on_device, state_digest
from tests.engine.optim.test_fused import planted_step
from tests.models import Planted
from tests.ranks.harness import run_ranks

TINY = ["recipe=resnet18", "data=synthetic", "data.num_samples=32", "data.image_size=8", "data.batch_size=8"]
TINY += ["tracker=none", "train.max_steps=2", "launch.nproc=1"]
# Torch's own compiler uses torch.jit when it is first imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def no_headers(run: Callable[..., object]) -> Callable[..., object]:
    def compiled(*arguments: object) -> object:
        raise RuntimeError(
            "backend='inductor' raised:\nfatal error: Python.h: No such file\n\nSet TORCHDYNAMO"
        )

    return compiled


def other_values(run: Callable[..., object]) -> Callable[..., object]:
    def compiled(*arguments: object) -> object:
        result = run(*arguments)
        if isinstance(result, torch.Tensor):
            return result
        piece = arguments[1]
        return (piece.master if piece.master is not None else piece.weight).mul_(1 + 2.0**-8)

    return compiled


def other_sums(run: Callable[..., object]) -> Callable[..., object]:
    return lambda *arguments: result * 2 if (result := run(*arguments)) is not None else None


def other_rounding(run: Callable[..., object]) -> Callable[..., object]:
    """The half weights are those of the step before."""

    def compiled(*arguments: object) -> object:
        piece = arguments[1] if len(arguments) == 4 else None
        before = piece.weight.clone() if piece is not None and piece.half else None
        result = run(*arguments)
        if before is not None:
            piece.weight.copy_(torch.nextafter(piece.weight, torch.full_like(before, 9)))
        return result

    return compiled


def trained(stepper: Stepper) -> str:
    for gradient in (0.25, -1.0, 3.0):
        planted_step(stepper, gradient, 2 * gradient)
    return state_digest(stepper)


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (no_headers, "RuntimeError: fatal error: Python.h: No such file"),
        (other_values, "a compiled update differs from the plain one by"),
        (other_sums, "a compiled sum of squares is"),
        (other_rounding, "half weights are not the rounded masters"),
    ],
)
def test_a_compiler_that_fails_or_errs_leaves_the_plain_update_with_the_reason(
    monkeypatch, breaks, text
) -> None:
    for optimizer in (SGD(0.1, 0.9, True, 0.01), AdamW(0.01)):
        plain = Stepper(Planted(), optimizer, Policy.fp16(), reference_count=1)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", breaks)
            stepper = Stepper(Planted(), optimizer, Policy.fp16(), reference_count=1, compiled=True)
        assert not stepper.compilation.used
        assert stepper.compilation.reason.startswith(f"compiling failed on 32 elements: {text}")
        assert trained(stepper) == trained(plain)
        assert plain.compilation == Compilation(False)


def test_what_is_switched_off_is_not_called_compiled() -> None:
    with torch._dynamo.config.patch(disable=True):
        stepper = Stepper(Planted(), SGD(0.1), compiled=True)
    assert "torch.compile is switched off (TORCH_COMPILE_DISABLE)" in stepper.compilation.reason


def test_an_adapted_optimizer_is_not_tried(monkeypatch) -> None:
    """It has no expressions to compile; the sums of its gradients are."""
    monkeypatch.setattr(torch, "compile", lambda run: run)
    stepper = Stepper(Planted(), TorchOptimizer(torch.optim.Adam, 0.1), compiled=True)
    assert stepper.compilation.used


def one_rank_cannot(env: WorkerEnv) -> tuple[Compilation, str]:
    """Rank 1 has no headers, rank 2 does not ask for a compiled update."""
    torch.compile = no_headers if env.rank == 1 else lambda run: run
    stepper = Stepper(
        Planted(), AdamW(0.01), Policy.fp16(), env.group, reference_count=1, compiled=env.rank != 2
    )
    return stepper.compilation, trained(stepper)


@pytest.mark.slow
def test_all_ranks_take_the_plain_update_where_one_cannot_compile() -> None:
    found = run_ranks(3, one_rank_cannot)
    told = [compilation.reason for compilation, _ in found]
    assert [compilation.used for compilation, _ in found] == [False] * 3
    assert told[0] == "compiling failed on rank(s) 1, 2: this one could compile"
    assert told[1].startswith("compiling failed on rank(s) 1, 2: RuntimeError: fatal error: Python.h")
    assert told[2] == ""
    assert len({digest for _, digest in found}) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("answers_version", [False, True])
def test_a_run_with_a_broken_cxx_compiler_says_so_and_trains_on(tmp_path, answers_version) -> None:
    """A real program on PATH that fails: at once, or where it has something to compile."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    version = 'case "$*" in *--version*) echo "g++ (GCC) 12.2.0"; exit 0;; esac\n' if answers_version else ""
    compiler.write_text(f"#!/bin/sh\n{version}echo 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    environ = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    environ |= {
        "PATH": f"{compiler.parent}:{environ['PATH']}",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    told = [run_launcher(tmp_path / str(costs), environ, costs) for costs in (0, 30)]
    (compiled_why, digest), (plain_why, expected) = told
    assert plain_why.endswith(" and saves 0 s of this run")
    assert compiled_why.startswith("plain: compiling failed on 32 elements: ")
    assert ("Python.h" if answers_version else "No working C++ compiler") in compiled_why
    assert digest == expected


def run_launcher(directory: Path, environ: dict[str, str], seconds_to_compile: float) -> tuple[str, str]:
    """The decision on the update, and the digest of the weights."""
    code = f"""
import json, sys
from pathlib import Path
from launcher.training.setup import build
from launcher.cli import main
build.SECONDS_TO_COMPILE = {seconds_to_compile}
code = main({[*TINY, f"run.dir={directory}"]!r})
assert not code, code
run = Path({str(directory)!r})
events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
(text,) = [event["text"] for event in events if event.get("topic") == "update"]
print(json.dumps([text, json.loads((run / "result.json").read_text())["weights_sha256"]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text, digest = json.loads(done.stdout.splitlines()[-1])
    return text, digest


@pytest.mark.parametrize("field", ["skip", "state", "packed"])
def test_a_compiler_that_judges_a_step_otherwise_is_not_used(monkeypatch, field) -> None:
    """On a GPU; here that part of the trial alone."""

    def other(run: Callable[..., object]) -> Callable[..., object]:
        def compiled(*arguments: object) -> object:
            verdict = run(*arguments)
            value = getattr(verdict, field)
            changed = ~value if value.dtype == torch.bool else value + 1
            return verdict._replace(**{field: changed})  # type: ignore[attr-defined]

        return compiled

    layout, terms = Layout(Planted(), Policy.fp16()), Terms(1.0, 1.0, Scaling())
    monkeypatch.setattr(torch, "compile", lambda run: run)
    _compare_judgements(layout, terms, num_rates=1, shared=False)
    monkeypatch.setattr(torch, "compile", other)
    with pytest.raises(_Wrong, match=f"another {field} than"):
        _compare_judgements(layout, terms, num_rates=1, shared=False)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("reference_count", [None, 1])
@pytest.mark.parametrize("groups", [(), [ParameterGroup("vector", weight_decay=0.0)]], ids=["", "groups"])
def test_the_trial_compiles_what_the_steps_run(monkeypatch, clip_norm, reference_count, groups) -> None:
    """With their clip norm, scaling, number of rates and groups: no step compiles anything anew."""
    torch._dynamo.reset()
    frames: dict[str, CompileCounter] = {}

    def compiling(run: Callable[..., object]) -> Callable[..., object]:
        if run.__name__ == "_block_sums":
            return run  # it is compiled for each dtype and width
        return torch._dynamo.optimize(frames.setdefault(run.__name__, CompileCounter()))(run)

    monkeypatch.setattr(torch, "compile", compiling)
    with deciding_on_device():
        stepper = Stepper(
            Planted(32, 1, 32),
            AdamW(0.01),
            scaling=Scaling(init=64, growth_interval=3),
            clip_norm=clip_norm,
            learning_rates=[0.1, 0.2, 0.3],
            reference_count=reference_count,
            compiled=True,
            groups=groups,
        )
    assert stepper.compilation.used
    tried = {name: frame.frame_count for name, frame in frames.items()}
    assert tried.keys() == {"judge", "_predicated", "factors"}
    assert tried["judge"] == tried["factors"] == 1
    for number in range(4):
        planted_step(stepper, float(number), 1.0)
    assert {name: frame.frame_count for name, frame in frames.items()} == tried
