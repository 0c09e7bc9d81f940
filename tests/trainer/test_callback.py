"""The callbacks of a run: equal on all ranks, and what one keeps from step to step is saved or named here."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, get_type_hints

import pytest

from launcher import worker
from launcher.checkpoint.run_state import MonitoredMetric
from launcher.config.schema import EarlyStoppingConfig
from launcher.distributed.env import LaunchEnv
from launcher.run_dir.result import Result
from launcher.telemetry import Telemetry
from launcher.trainer import build_callbacks, results
from launcher.trainer import callbacks as folder
from launcher.trainer.callback import Callback, CallbackList
from launcher.trainer.callbacks.early_stopping import EarlyStopping, PatienceState
from launcher.trainer.progress import StepIndex
from launcher.trainer.trainer import Trainer
from tests.configs import composed
from tests.forked import launch_forked
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone

WORDS = [
    *("recipe=cnn", "data=digits", "data.batch_size=256", "tracker=none", "checkpoint.every_steps=2"),
    *("ema.decay=0.9", "early_stopping.patience=9", "telemetry.gradient_histogram_every_steps=1"),
    *("ddp.check_replicas_every_steps=1", "precision=fp16", "precision.loss_scale.init_scale=16777216"),
    *("train.max_steps=7", "train.eval_every_steps=3", "train.log_every_steps=2"),
]
# What a part keeps from step to step without saving it: a resumed run begins anew with it.
OF_THIS_PROCESS = {
    "step_logger": {"_window", "_samples", "_times", "_last"},  # the steps of a line
    "throughput_totals": {
        "_times",
        "_wire_bytes_per_step",
    },  # of a step; of the last process, as result.json says
    "gradient_histogram": {"_counts"},  # of a step that has not been read
    "skipped_steps": {"_warned_of_bad_loss"},
    "divergence": {"_last"},  # evidence
    "checkpoint": {"_best_step", "due"},
}
REPORTED = """
import json
import os

from launcher.recipe import recipe
from launcher.trainer.trainer import Trainer
from recipes.cnn import cnn

fit = Trainer.fit
def reported(trainer):
    with open(f"parts{os.environ['RANK']}.json", "w") as file:
        json.dump(trainer.callbacks.names, file)
    return fit(trainer)
Trainer.fit = reported


@recipe("own")
def own(config):
    return cnn(config)
"""


def test_the_list_is_equal_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REPORTED)
    done = launch_forked(
        tmp_path, [*WORDS, "recipe.uses=own", "recipes.path=own.py", "launch.nproc=2", "run.dir=run"]
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"parts{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first.index("ema") < first.index("divergence") < first.index("step_logger"), "in this order"
    assert {"stragglers", "early_stopping", "replica_check"} <= set(first)
    assert first[-1] == "checkpoint"


def plain(value: Any) -> Any:
    """Attributes as values that can be compared; what belongs to the whole run is left out."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in value]
    if value is None or isinstance(value, int | float | str):
        return value
    if type(value).__module__.startswith(("launcher.trainer", "launcher.checkpoint", "collections")):
        return repr(value) if not hasattr(value, "__dict__") else plain(vars(value))
    return type(value).__name__


SHARED = {
    *(
        "TrainContext",
        "CallbackList",
        "TrainAccuracy",
        "Checkpointer",
        "TrainLength",
    ),
    "NonFiniteInspector",  # which keeps the job alone
}


def kept(part: Callback) -> dict[str, Any]:
    values = {name: value for name, value in vars(part).items() if type(value).__name__ not in SHARED}
    return {name: plain(value) for name, value in values.items()}


def is_saved(part: Callback, name: str, before: Any) -> bool:
    """Whether the part saves something else where this attribute is as it was before."""
    now, state = getattr(part, name), json.dumps(part.state_dict())
    setattr(part, name, before)
    try:
        return json.dumps(part.state_dict()) != state
    finally:
        setattr(part, name, now)


def test_what_a_callback_keeps_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains in this process, and compares each callback after the steps with what it was before them."""
    lost: dict[str, set[str]] = {}
    fit = Trainer.fit

    def compared(trainer: Trainer) -> int:
        parts = dict(zip(trainer.callbacks.names, trainer.callbacks._callbacks, strict=True))
        before = {name: kept(part) for name, part in parts.items()}
        values = {
            name: {key: copy.copy(value) for key, value in vars(part).items()} for name, part in parts.items()
        }
        end = fit(trainer)
        for name, part in parts.items():
            changed = {key for key, value in kept(part).items() if before[name].get(key) != value}
            if type(part).state_dict is not Callback.state_dict:
                changed = {key for key in changed if not is_saved(part, key, values[name][key])}
            if changed:
                lost[name] = changed
        return end

    monkeypatch.setattr(Trainer, "fit", compared)
    monkeypatch.setattr(results, "write_page", lambda run_dir, telemetry: None)
    config = composed(*WORDS)
    (tmp_path / "run").mkdir()
    worker.run(replace(config, run=replace(config.run, dir=str(tmp_path / "run"))), LaunchEnv(), None, "job")
    unnamed = {name: found - OF_THIS_PROCESS.get(name, set()) for name, found in lost.items()}
    assert {name: found for name, found in unnamed.items() if found} == {}
    assert {"step_logger", "divergence"} <= lost.keys(), "the test sees what changes"


def test_a_callback_adds_to_the_result_by_its_type() -> None:
    """mypy sees a key that the result lacks; it does not see a part without types, or under another name."""
    modules = [import_module(f"{folder.__name__}.{each.name}") for each in iter_modules(folder.__path__)]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    adding = [
        each
        for each in classes
        if each.__module__.startswith(folder.__name__)
        and issubclass(each, Callback)
        and each.add_to_result is not Callback.add_to_result
    ]
    assert len(adding) >= 5, "the test finds the parts"
    for each in adding:
        assert get_type_hints(each.add_to_result) == {"result": Result, "return": Result}, each


class Counting(Callback):
    """Counts, and saves its count."""

    name = "counting"

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.count = values["count"]


def test_a_callback_keeps_its_state_where_its_file_and_class_are_renamed(tmp_path: Path) -> None:
    """The saved keys are what a run of today looks for after its source has been tidied."""
    source = Path(inspect.getsourcefile(EarlyStopping) or "").read_text()
    (tmp_path / "patience.py").write_text(source.replace("class EarlyStopping", "class Patience"))
    spec = spec_from_file_location("patience", tmp_path / "patience.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["patience"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["patience"]

    def part_of(kind: type[Any]) -> Any:
        return kind(context_alone(Telemetry(), LIMITS, 1), EarlyStoppingConfig(9, 0.0, None))

    before = part_of(EarlyStopping)
    before._watched = PatienceState(MonitoredMetric("accuracy", 0.5), 3, 2, 5)
    saved = json.loads(json.dumps(CallbackList([before]).state_dict()))
    renamed = part_of(module.Patience)
    CallbackList([renamed]).load_state_dict(saved)
    assert renamed.state_dict() == before.state_dict() != part_of(EarlyStopping).state_dict()


def test_a_callback_without_a_name_fails() -> None:
    class Nameless(Callback):
        pass

    with pytest.raises(AssertionError, match="Nameless has no name"):
        CallbackList([Nameless()])


def test_two_parts_with_one_name_fail() -> None:
    with pytest.raises(AssertionError, match="share a name"):
        CallbackList([Counting(), Counting()])


def test_a_callback_whose_state_a_checkpoint_lacks_keeps_its_default() -> None:
    part = Counting()
    CallbackList([part]).load_state_dict({})
    assert part.count == 0


class Hooked(Callback):
    """Records which of its hooks were called."""

    name = "hooked"

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_step_start(self, index: StepIndex) -> None:
        self.called.append("start")

    def on_flush(self) -> None:
        self.called.append("flush")


def test_only_overridden_hooks_are_called() -> None:
    first = Hooked()
    callbacks = CallbackList([Counting(), first])
    callbacks.on_step_start(StepIndex(0, 0, 1))
    callbacks.on_flush()
    callbacks.on_step_end(StepIndex(0, 0, 1), None)
    assert first.called == ["start", "flush"]


# Methods for callers that know the callback.
OFFERED = {"MicroBatch": {"choose"}}


HOOKS = dict(inspect.getmembers(Callback, inspect.isfunction))


def mistakes_of(kind: type) -> list[str]:
    """The public methods that override none of the base class, or have other arguments."""
    found = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        takes = tuple(inspect.signature(method).parameters)
        if name in HOOKS and takes != (needed := tuple(inspect.signature(HOOKS[name]).parameters)):
            found.append(f"{kind.__name__}.{name} takes {takes}: as a hook it takes {needed}")
        if name not in HOOKS and not name.startswith("_") and name not in OFFERED.get(kind.__name__, ()):
            found.append(f"{kind.__name__}.{name} overrides nothing")
    return found


def test_callbacks_have_no_other_methods_than_the_hooks() -> None:
    """A misspelt hook would never be called."""
    kinds = [
        each
        for each in vars(build_callbacks).values()
        if isinstance(each, type) and issubclass(each, Callback)
    ]
    kinds.remove(Callback)
    assert len(kinds) >= 16, "the test finds the callbacks"
    assert {"StepLogger", "CheckpointCallback"} <= {kind.__name__ for kind in kinds}
    assert [text for kind in kinds for text in mistakes_of(kind)] == []


def test_a_misspelt_hook_is_found() -> None:
    mine = type("Mine", (Callback,), {"on_step_ends": lambda self, index: None})
    assert mistakes_of(mine) == ["Mine.on_step_ends overrides nothing"]
    mine = type("Mine", (Callback,), {"on_flush": lambda self, seconds: None})
    assert mistakes_of(mine) == ["Mine.on_flush takes ('self', 'seconds'): as a hook it takes ('self',)"]
