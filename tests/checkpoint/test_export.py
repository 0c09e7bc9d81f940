"""Exported weights: what the bare model takes in a process that knows nothing of the run."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from launcher.checkpoint.export import export
from launcher.checkpoint.run_state import (
    BestEvaluation,
    RunExtras,
    Snapshot,
    TrainProgress,
    identity_of,
    take_snapshot,
)
from launcher.checkpoint.storage import publish
from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, Stepper
from launcher.errors import ConfigError, StorageError
from tests.configs import composed
from tests.engine.observe import train
from tests.faults.saving import outcome_of
from tests.models import Odd, conv_net, features
from tests.snapshots import comparable, publish_steps, snapshot

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)


def with_hidden_buffer() -> nn.Module:
    model = conv_net()
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    return model


MODELS = {"conv": (conv_net, (3, 8, 8)), "odd": (Odd, (8,)), "hidden": (with_hidden_buffer, (3, 8, 8))}


def trained(name: str) -> Snapshot:
    build, shape = MODELS[name]
    stepper = Stepper(build(), AdamW(0.01))
    for step in range(3):
        train(stepper, *features(8, step, shape))
    identity = identity_of(composed(), stepper.model, 9)
    made = take_snapshot(stepper, ALONE, identity, TrainProgress(0, 3, 24))
    assert made is not None
    return made


def load_into_bare_model(pipe: Connection, name: str, file: Path) -> None:
    """Nothing but torch, safetensors and the model."""
    model = MODELS[name][0]()
    model.load_state_dict(load_file(file))
    pipe.send({key: comparable(value) for key, value in model.state_dict().items()})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* parameters received no gradient")
@pytest.mark.parametrize(
    "name", ["odd", *(pytest.param(each, marks=pytest.mark.slow) for each in ("conv", "hidden"))]
)
def test_the_bare_model_takes_the_file_in_a_fresh_process(tmp_path: Path, name) -> None:
    made = trained(name)
    publish(tmp_path / "checkpoints", made)
    file = tmp_path / "weights.safetensors"
    export(tmp_path, file)
    code, said = outcome_of(load_into_bare_model, name, file)
    assert code == 0
    kept = made.engine.weights | made.engine.buffers
    model = MODELS[name][0]()
    assert said[0].keys() == model.state_dict().keys()
    for key, value in said[0].items():
        expected = kept[made.names[key]].to(model.state_dict()[key].dtype)
        assert value == comparable(expected), key


def test_fp32_is_the_masters_and_fp16_their_rounding(tmp_path: Path) -> None:
    made = trained("conv")
    publish(tmp_path / "checkpoints", made)
    files = {dtype: tmp_path / dtype for dtype in ("fp32", "fp16")}
    for dtype, file in files.items():
        export(tmp_path, file, dtype)
    for key, name in made.names.items():
        kept: Tensor = (made.engine.weights | made.engine.buffers)[name]
        wide, narrow = load_file(files["fp32"])[key], load_file(files["fp16"])[key]
        assert torch.equal(wide, kept)
        assert torch.equal(narrow, kept.half() if kept.is_floating_point() else kept)
    with safe_open(files["fp16"], "pt") as opened:
        assert opened.metadata() == {"format": "pt", "checkpoint": "step-00000003", "dtype": "fp16"}


def test_what_does_not_fit_into_fp16_is_refused(tmp_path: Path) -> None:
    large = replace(snapshot().engine, buffers={"norm.count": torch.tensor(70_000.0)})
    publish(tmp_path / "checkpoints", replace(snapshot(), engine=large))
    with pytest.raises(ConfigError, match=r"norm\.count holds values up to 70000, beyond .* \(65504\)"):
        export(tmp_path, tmp_path / "weights", "fp16")
    assert not (tmp_path / "weights").exists()
    export(tmp_path, tmp_path / "weights", "fp32")


def test_a_file_that_no_export_has_written_is_left_as_it_is(tmp_path: Path) -> None:
    publish_steps(tmp_path / "checkpoints", 1)
    own, other = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    for _ in range(2):
        export(tmp_path, own)
    save_file({"weight": torch.ones(1)}, other)
    for file in (other, *tmp_path.glob("checkpoints/*/weights.safetensors")):
        before = file.read_bytes()
        with pytest.raises(ConfigError, match="not from an export"):
            export(tmp_path, file)
        assert file.read_bytes() == before


def test_the_best_instead_of_the_newest(tmp_path: Path) -> None:
    extra = RunExtras(best=BestEvaluation("accuracy", 0.9, step=2))
    for number, metric in ((1, 0.1), (2, 0.9), (3, 0.5), (4, None)):
        publish(tmp_path / "checkpoints", snapshot(number, metric, extra=extra))
    assert export(tmp_path, tmp_path / "w").checkpoint.name == "step-00000004"
    assert export(tmp_path, tmp_path / "w", best=True).checkpoint.name == "step-00000002"


def test_a_damaged_newest_one_is_passed_over_and_left_where_it_is(tmp_path: Path) -> None:
    old, new = publish_steps(tmp_path / "checkpoints", 1, 2)
    (new / "weights.safetensors").write_bytes(b"")
    assert export(tmp_path, tmp_path / "w").checkpoint == old
    assert new.exists()


@pytest.mark.parametrize("best", [False, True])
def test_nothing_to_export(tmp_path: Path, best) -> None:
    with pytest.raises(StorageError, match="holds no intact checkpoint"):
        export(tmp_path, tmp_path / "w", best=best)
    with pytest.raises(ConfigError, match="there is no such directory"):
        export(tmp_path / "nowhere", tmp_path / "w")
