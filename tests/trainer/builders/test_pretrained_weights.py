"""`model.init_from=FILE`: what a model takes from a file, what is said of it, and which files are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from launcher.distributed.env import WorkerEnv
from launcher.trainer.builders.pretrained_weights import LoadReport, load_weights
from tests.configs import composed
from tests.models import Odd, conv_net, mlp

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)


def load(model: nn.Module, file: Path | str, *, strict: bool = True, sha256: str | None = None) -> LoadReport:
    config = composed()
    wish = dataclasses.replace(
        config.model, init_from=str(file), init_from_strict=strict, init_from_sha256=sha256
    )
    loaded = load_weights(dataclasses.replace(config, model=wish), model, ALONE)
    assert loaded is not None
    return loaded


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.contiguous().clone() for name, value in model.state_dict().items()}


def saved(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path)
    return path


def refused(model: nn.Module, file: Path | str, **options) -> str:
    """The error; the model is unchanged."""
    before = state_of(model)
    loaded = load(model, file, **options)
    assert loaded.error.startswith(f"model.init_from={file}: ")
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    return loaded.error


@pytest.mark.parametrize("build", [conv_net, Odd])
def test_weights_and_buffers_are_those_of_the_file(tmp_path, build) -> None:
    of_file = build(seed=1)
    for buffer in of_file.buffers():
        buffer.copy_(torch.ones_like(buffer))
    file = saved(tmp_path / "w.safetensors", state_of(of_file))
    model = build(seed=0)
    loaded = load(model, file, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    assert loaded.error == ""
    assert loaded.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    count = len(model.state_dict())
    assert loaded.text == f"{count} of {count} tensors from {file} (sha256 {loaded.sha256[:12]})"
    expected = of_file.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
    strides = [value.stride() for value in build(seed=0).state_dict().values()]
    assert [value.stride() for value in model.state_dict().values()] == strides


def test_a_tied_weight_may_have_one_of_its_names(tmp_path) -> None:
    tensors = state_of(Odd(seed=1))
    del tensors["tied.weight"]
    assert load(Odd(), saved(tmp_path / "w.safetensors", tensors)).error == ""
    tensors["tied.weight"] = tensors["first.weight"] + 1
    error = refused(Odd(), saved(tmp_path / "w.safetensors", tensors))
    assert "first.weight and tied.weight are one tensor in the model, and differ in the file" in error


def test_a_batch_norm_of_an_older_file_lacks_its_counter(tmp_path) -> None:
    tensors = {name: value for name, value in state_of(conv_net(1)).items() if "num_batches" not in name}
    assert load(conv_net(), saved(tmp_path / "w.safetensors", tensors)).error == ""


def test_another_head_is_refused_and_stays_random_where_that_is_asked_for(tmp_path) -> None:
    tensors = state_of(mlp(1)) | {"2.weight": torch.ones(5, 16), "more": torch.ones(1)}
    del tensors["0.bias"]
    file = saved(tmp_path / "w.safetensors", tensors)
    error = refused(mlp(), file)
    fits = (
        "; kept as the recipe builds them, not in it or of another shape: "
        "0.bias, 2.weight ([5, 16] in the file, [3, 16] in the model); "
        "not in this model: more"
    )
    assert f"it does not fit the model: 2 of 4 tensors from {file} " in error
    assert f"{fits}. " in error
    assert "model.init_from_strict=false loads those that fit" in error
    model, built = mlp(), state_of(mlp())
    loaded = load(model, file, strict=False)
    assert loaded.error == ""
    assert loaded.text == f"2 of 4 tensors from {file} (sha256 {loaded.sha256[:12]}){fits}"
    assert torch.equal(model.state_dict()["0.weight"], tensors["0.weight"])
    for name in ("0.bias", "2.weight"):
        assert torch.equal(model.state_dict()[name], built[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_values_are_taken(tmp_path, dtype) -> None:
    tensors = {name: value.to(dtype) for name, value in state_of(mlp(1)).items()}
    model = mlp()
    assert load(model, saved(tmp_path / "w.safetensors", tensors)).error == ""
    assert torch.equal(model.state_dict()["0.weight"], tensors["0.weight"].float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_values_are_refused(tmp_path, dtype) -> None:
    tensors = state_of(mlp(1)) | {"0.weight": torch.ones(16, 8).to(dtype)}
    error = refused(mlp(), saved(tmp_path / "w.safetensors", tensors))
    name = str(dtype).removeprefix("torch.")
    assert f"0.weight is {name} in the file; the model needs float64 or float32" in error


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_its_name(tmp_path, value) -> None:
    tensors = state_of(mlp(1))
    tensors["2.weight"][1, 1] = value
    error = refused(mlp(), saved(tmp_path / "w.safetensors", tensors))
    assert "2.weight has values in the file that are not finite" in error


def test_a_file_of_another_model_is_refused_whatever_is_asked_for(tmp_path) -> None:
    file = saved(tmp_path / "w.safetensors", state_of(conv_net()))
    for strict in (True, False):
        error = refused(mlp(), file, strict=strict)
        assert "No tensor fits by name and shape: it is of another model." in error
        assert "init_from_strict" not in error


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "w"])
def test_a_safetensors_file_with_the_ending_of_a_pickle_is_read(tmp_path, name) -> None:
    assert load(mlp(), saved(tmp_path / name, state_of(mlp(1)))).error == ""


def test_a_pickle_is_refused_and_the_line_in_the_error_converts_it(tmp_path) -> None:
    shared = mlp(1)
    tensors = dict(shared.state_dict()) | {"0.weight": shared.state_dict()["0.weight"].t().contiguous().t()}
    for name, zipped in (("w.pt", True), ("w.bin", False), ("w.weights", True)):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=zipped)
        error = refused(mlp(), tmp_path / name)
        assert "it is a pickle, which may run code when it is read. Only safetensors are read." in error
        run_line_of(error)
        assert load(mlp(), tmp_path / "w.safetensors").error == ""
    pickled = tmp_path / "p.safetensors"
    torch.save(tensors, pickled)
    before = pickled.read_bytes()
    run_line_of(refused(mlp(), pickled))
    assert pickled.read_bytes() == before
    assert load(mlp(), tmp_path / "p.converted.safetensors").error == ""


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "net"])
def test_the_line_converts_a_state_dict_within_what_a_training_script_saves(tmp_path, key) -> None:
    weights = mlp(1).state_dict()
    optimizer = torch.optim.SGD(mlp(1).parameters(), 0.1, momentum=0.9).state_dict()
    torch.save({"epoch": 3, "best": 0.5, key: weights, "optimizer": optimizer}, tmp_path / "w.pth")
    run_line_of(refused(mlp(), tmp_path / "w.pth"))
    model = mlp()
    assert load(model, tmp_path / "w.safetensors").error == ""
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


@pytest.mark.parametrize("size", [128, 640])
def test_a_header_whose_length_begins_like_a_pickle_is_none(tmp_path, size) -> None:
    bias = state_of(mlp(1))["2.bias"]
    about = {"2.bias": {"dtype": "F32", "shape": list(bias.shape), "data_offsets": [0, 4 * len(bias)]}}
    header = json.dumps(about).encode().ljust(size)
    file = tmp_path / "w.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + header + bias.numpy().tobytes())
    model = mlp()
    assert load(model, file, strict=False).error == ""
    assert torch.equal(model.state_dict()["2.bias"], bias)


def run_line_of(error: str) -> None:
    (line,) = re.findall(r'python (-c ".*")', error)
    exec(shlex.split(line)[1], {})  # a process of its own would import torch for 2 s


def damaged(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def made_text(file: Path) -> None:
    file.write_text("weights " * 50)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (damaged, "it is damaged, or not one safetensors file"),
        (emptied, "it is damaged, or not one safetensors file"),
        (made_text, "it is damaged, or not one safetensors file"),
        (Path.unlink, "cannot be read: No such file or directory. Give a safetensors file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, spoil, text) -> None:
    file = saved(tmp_path / "w.safetensors", state_of(mlp(1)))
    spoil(file)
    assert text in refused(mlp(), file, strict=False)


def test_a_run_is_refused_with_what_to_give(tmp_path) -> None:
    text = refused(mlp(), tmp_path)
    assert f"{tmp_path.name} cannot be read: Is a directory. Give a safetensors file" in text
    assert "`python -m launcher export RUN FILE` writes one" in text


def test_another_digest_than_the_recorded_one_is_refused(tmp_path) -> None:
    file = saved(tmp_path / "w.safetensors", state_of(mlp(1)))
    assert f"but model.init_from_sha256={'0' * 64}" in refused(mlp(), file, sha256="0" * 64)
