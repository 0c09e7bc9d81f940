"""The parts of a run: the same on all ranks, and what one keeps from step to step is saved or named here."""

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
from launcher.checkpoint.snapshot import MonitoredMetric
from launcher.config.schema import EarlyStoppingConfig
from launcher.distributed.env import LaunchEnv
from launcher.run_dir.result import Result
from launcher.training import ends, part_list
from launcher.training import parts as folder
from launcher.training.job import Job
from launcher.training.moments import Parts
from launcher.training.parts.early_stopping import EarlyStopping, WatchedMetric
from launcher.training.progress import Course
from launcher.training.pruning import PruneCheck
from launcher.training.reports import Reports
from tests.configs import composed
from tests.forked import launch_forked

WORDS = [
    *("recipe=cnn", "data=digits", "data.batch_size=256", "tracker=none", "checkpoint.every_steps=2"),
    *("ema.decay=0.9", "early_stopping.patience=9", "telemetry.gradient_histogram_every_steps=1"),
    *("ddp.check_replicas_every_steps=1", "precision=fp16", "precision.loss_scale.init_scale=16777216"),
    *("train.max_steps=7", "train.eval_every_steps=3", "train.log_every_steps=2"),
]
# What a part keeps from step to step without saving it: a resumed run begins anew with it.
OF_THIS_PROCESS = {
    "reports": {"seconds", "_waiting", "_previous"},  # the step that is not read yet: there is none then
    "log": {"_window", "_samples", "_times", "_last"},  # the steps of a line
    "totals": {
        "latest",
        "_times",
        "_wire_bytes_per_step",
    },  # of a step; of the last process, as result.json says
    "gradient_stats": {"_next", "_counts"},  # when to count follows from the number of the step
    "first_step": {"_done"},
    "skipped_steps": {"_bad_loss_steps"},  # how often a warning was given
    "divergence": {"_scales", "_last"},  # evidence
    "evaluation": {"latest"},  # a run resumed after its end evaluates again
    "checkpoints": {"_best_step", "due"},
}
REPORTED = """
import json
import os

from launcher import worker
from launcher.recipe import recipe
from recipes.cnn import cnn

train = worker.train
def reported(job, *more):
    with open(f"parts{os.environ['RANK']}.json", "w") as file:
        json.dump(job.parts.names, file)
    return train(job, *more)
worker.train = reported


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
    assert first.index("averages") < first.index("reports") < first.index("log"), "in this order"
    assert {"stragglers", "early_stopping", "replica_check"} <= set(first)
    assert first[-1] == "checkpoints"


def plain(value: Any) -> Any:
    """Attributes as values that can be compared; what belongs to the whole run is left out."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in value]
    if value is None or isinstance(value, int | float | str):
        return value
    if type(value).__module__.startswith(("launcher.training", "launcher.checkpoint", "collections")):
        return repr(value) if not hasattr(value, "__dict__") else plain(vars(value))
    return type(value).__name__


SHARED = {
    *(
        "Run",
        "Job",
        "Parts",
        "Answers",
        "SavedRun",
        "Checkpointer",
        "Course",
        "Rescue",
        "TrainingMetrics",
        "Reports",
        "Totals",
    ),
    "DivergenceInspector",  # which keeps the job alone
}


def kept(part: object) -> dict[str, Any]:
    values = {name: value for name, value in vars(part).items() if type(value).__name__ not in SHARED}
    return {name: plain(value) for name, value in values.items()}


def is_saved(part: Any, name: str, before: Any) -> bool:
    """Whether the part saves something else where this attribute is as it was before."""
    now, state = getattr(part, name), json.dumps(part.state())
    setattr(part, name, before)
    try:
        return json.dumps(part.state()) != state
    finally:
        setattr(part, name, now)


def test_what_a_part_keeps_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains in this process, and compares each part after the steps with what it was before them."""
    lost: dict[str, set[str]] = {}
    train = worker.train

    def compared(job: Job, *more: Any) -> int:
        parts = dict(zip(job.parts.names, job.parts._parts, strict=True))
        before = {name: kept(part) for name, part in parts.items()}
        values = {
            name: {key: copy.copy(value) for key, value in vars(part).items()} for name, part in parts.items()
        }
        values |= {"training_metrics": copy.deepcopy(values["training_metrics"])}
        end = train(job, *more)
        for name, part in parts.items():
            changed = {key for key, value in kept(part).items() if before[name].get(key) != value}
            if hasattr(part, "state"):
                changed = {key for key in changed if not is_saved(part, key, values[name][key])}
            if changed:
                lost[name] = changed
        return end

    monkeypatch.setattr(worker, "train", compared)
    monkeypatch.setattr(ends, "write_page", lambda run_dir, telemetry: None)
    config = composed(*WORDS)
    (tmp_path / "run").mkdir()
    worker.run(replace(config, run=replace(config.run, dir=str(tmp_path / "run"))), LaunchEnv(), None, "job")
    unnamed = {name: found - OF_THIS_PROCESS.get(name, set()) for name, found in lost.items()}
    assert {name: found for name, found in unnamed.items() if found} == {}
    assert {"reports", "log", "divergence"} <= lost.keys(), "the test sees what changes"


def test_a_part_adds_to_the_result_by_its_type() -> None:
    """mypy sees a key that the result lacks; it does not see a part without types, or under another name."""
    modules = [import_module(f"{folder.__name__}.{each.name}") for each in iter_modules(folder.__path__)]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    adding = [
        each for each in classes if each.__module__.startswith(folder.__name__) and hasattr(each, "add_to")
    ]
    assert len(adding) >= 7, "the test finds the parts"
    for each in adding:
        assert get_type_hints(each.add_to) == {"result": Result, "return": Result}, each


def parts_of(*parts: object) -> Parts:
    return Parts(course=None, reports=REPORTS, parts=parts)  # type: ignore[arg-type]


class Counting:
    """A part that counts, and saves its count."""

    name = "counting"

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, values: dict[str, Any]) -> None:
        self.count = values["count"]


def test_the_state_of_a_part_that_a_run_lacks_is_kept_for_the_next_one_that_has_it() -> None:
    first = Counting()
    first.count = 3
    saved = parts_of(first).state()
    without = parts_of()
    without.load_state(saved)
    again = Counting()
    parts_of(again).load_state(without.state())
    assert again.count == 3


def test_a_part_keeps_its_state_where_its_file_and_class_are_renamed(tmp_path: Path) -> None:
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
        return kind(EarlyStoppingConfig(9, 0.0, None), None, Course(1, 9, 1), None)

    before = part_of(EarlyStopping)
    before._watched = WatchedMetric(MonitoredMetric("accuracy", 0.5), 3, 2, 5)
    saved = json.loads(json.dumps(parts_of(before).state()))
    renamed = part_of(module.Patience)
    parts_of(renamed).load_state(saved)
    assert renamed.state() == before.state() != part_of(EarlyStopping).state()


def test_a_part_without_a_name_fails() -> None:
    class Nameless:
        def state(self) -> dict[str, Any]:
            return {}

    with pytest.raises(AssertionError, match="Nameless has no name"):
        parts_of(Nameless())


def test_two_parts_with_one_name_fail() -> None:
    with pytest.raises(AssertionError, match="share a name"):
        parts_of(Counting(), Counting())


def test_a_part_whose_state_a_checkpoint_lacks_keeps_its_default() -> None:
    part = Counting()
    parts_of(part).load_state({})
    assert part.count == 0


class Nobody:
    readers: tuple = ()
    log_rests: tuple = ()


REPORTS = Nobody()


# The methods that make a part, with the names of their arguments.
MOMENTS = {
    "begin": ("step",),
    "vote": ("position",),
    "after_launch": ("position", "result"),
    "after_step": ("position", "report"),
    "pause": (),
    "check_evaluations": ("evaluations",),
    "after_evaluation": ("position", "measured"),
    "at_end": ("position", "measured"),
    "end_step": ("position", "measured"),
    "state": (),
    "load_state": ("values",),
    "add_to": ("result",),
}
# Those for callers that know the part.
OFFERED = {
    "Reports": {"flush", "drain", "restart_timer"},
    "PruneCheck": {"asked"},
    "Evaluator": {"after", "evaluate", "is_best", "rehearse"},
    "InitialWeights": {"check"},
    "MicroBatch": {"choose", "abandons_after", "explained"},
    "TrainingMetrics": {"metrics"},
}


def mistakes_of(kind: type) -> list[str]:
    """The methods of a part that are neither moments nor offered, or take other arguments than a moment."""
    found = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        takes = tuple(inspect.signature(method).parameters)[1:]
        if name in MOMENTS and takes != MOMENTS[name]:
            found.append(
                f"{kind.__name__}.{name} takes {takes}: as a moment of a run it takes {MOMENTS[name]}"
            )
        if name not in MOMENTS and not name.startswith("_") and name not in OFFERED.get(kind.__name__, ()):
            found.append(f"{kind.__name__}.{name} is no moment of a run")
    return found


def test_the_parts_have_no_other_methods_than_the_moments() -> None:
    """A misspelt moment would never be called, and a helper with the name of one would be."""
    imported = [each for each in vars(part_list).values() if isinstance(each, type)]
    kinds = [each for each in imported if each.__module__.startswith(folder.__name__)]
    assert len(kinds) >= 20, "the test finds the parts"
    assert {"Log", "Checkpoints"} <= {kind.__name__ for kind in kinds}
    assert [text for kind in (*kinds, Reports, PruneCheck) for text in mistakes_of(kind)] == []


def part_with(name: str, *arguments: str) -> type:
    """A part with one method."""
    scope: dict[str, Any] = {}
    exec(f"def {name}({', '.join(('self', *arguments))}): ...", scope)
    return type("Mine", (), {name: scope[name]})


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (part_with("result"), ["Mine.result is no moment of a run"]),
        (
            part_with("pause", "seconds"),
            ["Mine.pause takes ('seconds',): as a moment of a run it takes ()"],
        ),
        (part_with("vote"), ["Mine.vote takes (): as a moment of a run it takes ('position',)"]),
        (part_with("_pause", "seconds"), []),
    ],
)
def test_another_method_than_a_moment_is_found(part: type, words: list[str]) -> None:
    assert mistakes_of(part) == words
