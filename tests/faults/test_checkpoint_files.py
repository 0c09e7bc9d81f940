"""`launcher.checkpoint` under kills within a save, damage of every file, full disks and differing views."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch

from launcher.checkpoint.catalog import newest_intact, resume
from launcher.checkpoint.manifest import MANIFEST, OPTIMIZER, STATE, WEIGHTS, verify
from launcher.checkpoint.storage import load, publish
from launcher.distributed import collectives
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, LauncherError, StorageError
from tests.faults import saving
from tests.ranks.harness import run_ranks
from tests.snapshots import IDENTITY, comparable, publish_steps, same, snapshot

FILES = (WEIGHTS, OPTIMIZER, STATE, MANIFEST)


def assert_all_intact(directory: Path) -> None:
    """Whatever bears a final name is complete."""
    assert {path.name: verify(path) for path in directory.glob("step-*") if verify(path)} == {}


# G5: SIGKILL at any instant of a save loses nothing


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    """A kill leaves what the kernel has taken; only this order survives a power cut as well."""
    told = []

    def told_fsync(descriptor: int, fsync=os.fsync) -> None:
        told.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def told_rename(source: Path, target: Path, rename=os.rename) -> None:
        told.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "rename", told_rename)
    final = publish(tmp_path / "checkpoints", snapshot(1))
    parent, *files, staged, renamed, last = told
    assert parent == tmp_path, "a new directory for checkpoints is synced too"
    assert [file.name for file in files] == list(FILES)
    assert {file.parent for file in files} == {staged}
    assert staged.parent == final.parent
    assert renamed == final
    assert last == final.parent


def test_kills_at_random_moments_lose_nothing_that_was_reported(tmp_path: Path) -> None:
    moments = random.Random(4)
    reached = 0
    for attempt in range(8):
        directory = tmp_path / str(attempt)
        process, pipe = saving.in_a_child(saving.save_for_ever, directory)
        first = pipe.recv() if pipe.poll(30) else None
        assert first == 1
        reported = first
        for _ in range(moments.randrange(4)):  # by saves, not by time, which beside other work is no save
            assert pipe.poll(30)
            reported = pipe.recv()
        time.sleep(moments.uniform(0.0, 0.06))
        process.kill()
        process.join()
        try:
            while True:
                reported = pipe.recv()
        except EOFError:
            pipe.close()
        assert_all_intact(directory)
        found = newest_intact(directory).path
        assert found is not None
        assert int(found.name[5:]) >= reported
        assert same(load(found), snapshot(int(found.name[5:]), num_values=20_000))
        reached += reported
    assert reached > 8, "the children were killed too early to have met a save in mid-write"


# G6: damage is detected, never loaded


def truncate(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        position %= path.stat().st_size
        value = os.pread(file.fileno(), 1, position)[0]
        os.pwrite(file.fileno(), bytes([value ^ 1 << bit]), position)


DAMAGE = {
    "truncated to nothing": lambda path: truncate(path, 0),
    "truncated to half": lambda path: truncate(path, 0.5),
    "truncated to 99.9 %": lambda path: truncate(path, 0.999),
    "first bit": lambda path: flip(path, 0, 0),
    "bit in the middle": lambda path: flip(path, path.stat().st_size // 2, 3),
    "last bit": lambda path: flip(path, -1, 7),
    "missing": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_set_aside_and_the_older_one_taken(tmp_path: Path, name, damage) -> None:
    old, new = publish_steps(tmp_path, 1, 2)
    DAMAGE[damage](new / name)
    with pytest.raises(StorageError, match=name.replace(".", r"\.")):
        load(new)
    found = newest_intact(tmp_path)
    assert found.path == old
    assert same(load(old), snapshot(1))
    assert list(found.damaged) == ["step-00000002"]
    assert all(problem.startswith(name) for problem in found.damaged["step-00000002"].split("; "))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-00000002", "step-00000001"]
    assert newest_intact(tmp_path).damaged == {}


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_noticed(tmp_path: Path, name) -> None:
    """Each bit of the manifest, and a bit in every 13th byte of the others."""
    (path,) = publish_steps(tmp_path, 1)
    original = (path / name).read_bytes()
    whole = name == MANIFEST
    for position in range(0, len(original), 1 if whole else 13):
        for bit in range(8) if whole else (position % 8,):
            flip(path / name, position, bit)
            assert verify(path), f"bit {bit} of byte {position}"
            flip(path / name, position, bit)
    assert not verify(path)


def unfinished(directory: Path) -> Path:
    """A newer directory that lacks what is written last."""
    (path,) = publish_steps(directory, 9)
    (path / MANIFEST).unlink()
    return path


@pytest.mark.parametrize("second", ["", "again"])
def test_nothing_intact_is_a_fresh_start_unless_resume_was_demanded(tmp_path: Path, second) -> None:
    env, directory = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None), tmp_path / "checkpoints"
    for path in publish_steps(directory, 1, 2):
        truncate(path / WEIGHTS, 0.5)
    if second:  # the names of an earlier set-aside are taken
        (directory / "damaged-step-00000002").mkdir()
    with pytest.raises(
        StorageError, match=r"there is no intact checkpoint\. Damaged: step-00000002"
    ) as refusal:
        resume(env, directory, str(directory), IDENTITY)
    assert refusal.value.exit_code == 8
    start = resume(env, directory, "auto", IDENTITY)
    assert start.snapshot is None
    assert list(start.damaged) == ["step-00000002", "step-00000001"]
    assert (directory / "damaged-step-00000002-2").exists() == bool(second)


# G7: a full disk is an error, not a loss


def test_a_full_disk_costs_one_checkpoint(tmp_path: Path) -> None:
    code, said = saving.outcome_of(saving.save_on_a_full_disk, tmp_path)
    if isinstance(said[0], str):
        pytest.skip(said[0])
    first, second, third, (newest, names) = said
    assert code == 0
    assert first == (1, "step-00000001", None)
    assert second[:2] == (2, None)
    assert "No space left on device" in second[2]
    assert third == (3, "step-00000003", None)
    assert (newest, names) == ("step-00000003", ["step-00000001", "step-00000003"])


def test_a_read_only_directory_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    code, said = saving.outcome_of(saving.save_in_a_read_only_place, tmp_path)
    if isinstance(said[1], str):
        pytest.skip(said[1])
    first, second = said
    assert code == 0
    assert first == (1, "step-00000001", None)
    assert "Read-only file system" in second[2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert same(load(tmp_path / "step-00000001"), snapshot(1))


# G9: one rank decides what to resume


def views(folder: Path) -> dict[str, tuple[list[Path], str]]:
    """For each case the directory that each of two ranks sees, and the expected outcome."""
    made: dict[str, tuple[list[Path], str]] = {}

    def case(name: str, outcome: str, *steps_by_rank: tuple[int, ...]) -> list[Path]:
        directories = [folder / f"{name}-{rank}" for rank in range(len(steps_by_rank))]
        for directory, steps in zip(directories, steps_by_rank, strict=True):
            publish_steps(directory, *steps)
        made[name] = (directories * (2 // len(directories)), outcome)
        return directories

    case("the same", "2", (1, 2))
    case("nothing anywhere", "None", ())
    case("only rank 1 lacks the newest", "2", (1, 2), (1,))
    case("only rank 0 lacks the newest", "1", (1,), (1, 2))
    case("only rank 0 has any", "1", (1,), ())
    case("only rank 1 has any", "None", (), (1,))
    shared = case("newest damaged", "1", (1, 2))[0]
    flip(shared / "step-00000002" / WEIGHTS, -1, 0)
    _, theirs = case("rank 1 sees damage", "2", (1, 2), (1, 2))
    flip(theirs / "step-00000002" / OPTIMIZER, -1, 0)
    _, theirs = case("another of that step", "2", (1, 2), (1,))
    publish(theirs, snapshot(2, metric=0.5))
    for directory in case("all damaged", "None", (1,), (1,)):
        flip(directory / "step-00000001" / OPTIMIZER, -1, 0)
    mine, _ = case("rank 0 sees damage", "1", (1, 2), (1, 2))
    flip(mine / "step-00000002" / OPTIMIZER, -1, 0)
    (folder / "a file-0").touch()
    made["a file"] = ([folder / "a file-0"] * 2, "refused: the checkpoints")
    return made


def resume_each(env: WorkerEnv, cases: dict[str, tuple[list[Path], str]]) -> dict[str, tuple[str, str]]:
    """The step, and all that was read: rank 0's, whatever the other rank sees."""
    collectives.PIECE_BYTES = 7  # several for each tensor
    outcomes = {}
    for name, (directories, _) in cases.items():
        try:
            found = resume(env, directories[env.rank], "auto", IDENTITY).snapshot
            outcomes[name] = str(found and found.progress.step), str(found and comparable(found))
        except LauncherError as error:
            text = f"refused: {error}" if isinstance(error, StorageError) else repr(error)
            outcomes[name] = text, ""
    return outcomes


def test_all_ranks_resume_what_rank_0_resumes_whatever_they_see(tmp_path: Path) -> None:
    cases = views(tmp_path)
    first, second = run_ranks(2, resume_each, cases)
    assert first == second
    for name, (_, expected) in cases.items():
        step, read = first[name]
        assert step.startswith(expected), f"{name}: {step}"
        if step.isdigit():
            assert read == str(comparable(snapshot(int(step)))), name


def resume_with_another_seed_on_rank_1(env: WorkerEnv, directory: Path) -> str:
    """What one rank alone refuses is refused on all ranks."""
    identity = {**IDENTITY, "seed": "7"} if env.rank == 1 else IDENTITY
    try:
        resume(env, directory, "auto", identity)
    except ConfigError as error:
        return str(error)
    return "resumed"


def test_what_one_rank_refuses_all_refuse(tmp_path: Path) -> None:
    publish_steps(tmp_path, 1)
    first, second = run_ranks(2, resume_with_another_seed_on_rank_1, tmp_path)
    assert first == second
    assert first.startswith(
        f"on rank 1: {tmp_path / 'step-00000001'} belongs to another run: seed is 0 there"
    )
