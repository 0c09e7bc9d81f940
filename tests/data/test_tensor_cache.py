"""Tensors that are made once per machine: by one process, while the others wait."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from launcher.data.tensor_cache import Stored, cache_folder, cached

KEY = {"files": [["a", 1, 2]], "options": {"size": 3}}
MADE = Stored({"ids": torch.arange(5, dtype=torch.int32), "labels": torch.tensor([1, 0])}, {"classes": "a b"})


def never() -> Stored:
    raise AssertionError("it was there already")


def assert_made(found: Stored) -> None:
    assert found.texts == MADE.texts
    assert found.tensors.keys() == MADE.tensors.keys()
    assert all(torch.equal(found.tensors[name], MADE.tensors[name]) for name in MADE.tensors)


@pytest.mark.parametrize("name", ["new", os.fsdecode(b"caf\xe9")], ids=["ascii", "latin-1"])
def test_what_was_made_is_read_by_the_next(tmp_path, name):
    assert_made(cached(tmp_path / name, KEY, lambda: MADE))
    assert_made(cached(tmp_path / name, KEY, never))
    assert len(list((tmp_path / name).glob("*.safetensors"))) == 1
    assert not list((tmp_path / name).glob("*.partial"))


def test_tensors_are_mapped_from_the_file(tmp_path):
    cached(tmp_path, KEY, lambda: MADE)
    found = cached(tmp_path, KEY, never)
    (path,) = tmp_path.glob("*.safetensors")
    assert str(path) in Path("/proc/self/maps").read_text()
    assert_made(found)


@pytest.mark.parametrize("other", [{**KEY, "files": [["a", 1, 3]]}, {**KEY, "more": True}])
def test_another_key_is_made_anew(tmp_path, other):
    cached(tmp_path, KEY, lambda: Stored({}, {"of": "before"}))
    assert_made(cached(tmp_path, other, lambda: MADE))


@pytest.mark.parametrize("damage", [b"", b"x" * 100])
def test_a_damaged_file_is_made_again(tmp_path, damage, caplog):
    cached(tmp_path, KEY, lambda: MADE)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(damage)
    assert_made(cached(tmp_path, KEY, lambda: MADE))
    assert "is made again" in caplog.text
    assert_made(cached(tmp_path, KEY, never))


def test_what_cannot_be_written_is_used_from_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert_made(cached(tmp_path / "file" / "below", KEY, lambda: MADE))
    assert "data.cache=DIR names another folder" in caplog.text


def test_without_a_folder_nothing_is_kept():
    assert cached(None, KEY, lambda: MADE) is MADE


def test_a_failure_leaves_no_file_under_the_final_name(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cached(tmp_path, KEY, lambda: 1 / 0)
    assert not list(tmp_path.glob("*.safetensors"))
    assert_made(cached(tmp_path, KEY, lambda: MADE))


def made_by_one(folder: Path, log: Path) -> None:
    def make() -> Stored:
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(0.3)
        return MADE

    assert_made(cached(folder, KEY, make))


def test_of_several_processes_one_makes_it_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=made_by_one, args=(tmp_path / "kept", log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "made\n"


def test_the_folder_that_the_config_asks_for(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "fp16-launcher"
    assert cache_folder("none") is None
    assert cache_folder("~/x") == Path.home() / "x"
