"""Metrics of one's own on several ranks: exact over uneven shares, each mistake one error on all ranks."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from launcher.data.sources import ONLY_SET
from launcher.data.tensors import TensorData
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, DataError, LauncherError, RecipeError
from launcher.evaluation.evaluate import EvalLoop, Evaluation, evaluate, monitored_metric
from launcher.metrics import Classification, Perplexity
from launcher.recipe import Loss, Recipe
from launcher.recipe.checks import refuse_unusable_data, refuse_unusable_metrics
from tests.ranks.harness import run_ranks

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
CLASSES = tuple("abcdefg")


def points(num_samples: int) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    return TensorData(
        {
            "x": torch.randn(num_samples, 4, generator=generator).to(torch.float16),
            "label": torch.randint(0, 7, (num_samples,), generator=generator),
            "target": torch.randn(num_samples, generator=generator) + 3,
        }
    )


def loss(network: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    """Outputs in fp16, as a loss that forgets about them would give."""
    logits = network(batch["x"].float())
    nats = nn.functional.cross_entropy(logits, batch["label"], reduction="sum")
    outputs = {"logits": logits.half(), "value": logits[:, 0].half()}
    return Loss(nats, len(logits), outputs)


class Pairs:
    """Remembers what it reads, in its order. Not exact, were it not fed in the order of the set."""

    names = ("digest", "samples_read")
    higher_is_better = True

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def update(self, outputs: Any, batch: Any) -> None:
        assert outputs["value"].dtype == torch.float32
        assert not outputs["value"].requires_grad
        self.rows += torch.stack([outputs["value"], batch["target"], batch["added"]], dim=1).tolist()

    def compute(self) -> dict[str, Any]:
        weights = np.arange(1, len(self.rows) + 1)
        digest = torch.tensor((np.array(self.rows) * weights[:, None]).sum())
        return {"digest": digest, "samples_read": np.int64(len(self.rows))}


class Merged(Pairs):
    def merge(self, other: Merged) -> None:
        self.rows += other.rows

    def compute(self) -> dict[str, Any]:
        return {f"merged_{name}": value for name, value in super().compute().items()}

    names = ("merged_digest", "merged_samples_read")


def recipe_of(data: TensorData, *metrics: Any, **changes: Any) -> Recipe:
    recipe = Recipe(
        lambda: nn.Linear(4, 7),
        data,
        data,
        loss,
        eval_transform=lambda batch: {**batch, "added": batch["target"] * 2},
        metrics=metrics,
    )
    return replace(recipe, **changes)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 7)


def measure(env: WorkerEnv, num_samples: int) -> Evaluation:
    class Local(Merged):
        """Defined where no other process could find it by its name."""

        names = ("local",)

        def compute(self) -> dict[str, Any]:
            return {"local": len(self.rows)}

    data = points(num_samples)
    metrics = [
        Classification(CLASSES, output="logits"),
        Pairs(),
        Perplexity(),
        Merged(),
        Local(),
    ]
    recipe = recipe_of(data, *metrics)
    refuse_unusable_metrics(recipe)
    found = [evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, env), data, 4) for _ in range(2)]
    assert found[0].metrics == found[1].metrics, "an evaluation starts from nothing"
    return found[1]


def expected(num_samples: int) -> dict[str, float]:
    """From one forward pass over the whole set, by the formulas."""
    data = points(num_samples)
    batch = {**data.columns, "added": data.columns["target"] * 2}
    of_set = loss(model(), batch)
    logits, value = (each.detach().float() for each in of_set.outputs.values())
    labels, predicted = data.columns["label"], logits.argmax(dim=1)
    occurring = torch.cat([labels, predicted]).unique()
    hits, true, found = (
        torch.stack([part(each).sum() for each in occurring]).double()
        for part in (
            lambda each: (labels == each) & (predicted == each),
            lambda each: labels == each,
            lambda each: predicted == each,
        )
    )
    f1 = 2 * hits / (true + found)
    ahead = logits.argsort(dim=1, descending=True)[:, :5]
    pairs = Merged()
    pairs.update({"value": value}, batch)
    digest = float(pairs.compute()["merged_digest"])
    return {
        "accuracy": float((labels == predicted).double().mean()),
        "macro_precision": float((hits / found.clamp(min=1)).mean()),
        "macro_recall": float((hits / true.clamp(min=1)).mean()),
        "macro_f1": float(f1.mean()),
        "weighted_f1": float((f1 * true).sum() / true.sum()),
        "top5_accuracy": float((ahead == labels[:, None]).any(dim=1).double().mean()),
        "digest": digest,
        "samples_read": num_samples,
        "perplexity": np.exp(of_set.sum.item() / num_samples),
        "merged_digest": digest,
        "merged_samples_read": num_samples,
        "local": num_samples,
    }


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("num_samples", [2, 23])  # of 2 samples the first of three ranks gets none
def test_any_metric_is_exact_on_any_number_of_ranks(num_samples: int) -> None:
    wanted = expected(num_samples)
    for world_size in (1, 2, 3):
        results = run_ranks(world_size, measure, num_samples)
        found = dict(results[0].metrics)
        assert found == pytest.approx(wanted, rel=1e-6)
        assert list(found) == list(wanted), "in the order of the recipe's metrics"
        for name in ("accuracy", "top5_accuracy", "digest", "merged_digest", "local"):
            assert found[name] == wanted[name] or "digest" in name
        assert all(each.metrics == results[0].metrics for each in results), "the same bits on all ranks"
        assert all(each.higher_is_better == results[0].higher_is_better for each in results)
        assert results[0].confusion.counts.sum() == num_samples
        assert all(each.confusion is None for each in results[1:])


class Stated(Merged):
    """Merged by a state of its own, which leaves out what cannot be sent."""

    names = ("merged_digest", "merged_samples_read")

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def reset(self) -> None:
        self.rows.clear()

    def __getstate__(self) -> Any:
        return {"rows": self.rows}

    def __setstate__(self, state: Any) -> None:
        self.rows = state["rows"]


def measure_stated(env: WorkerEnv) -> dict[str, float]:
    data = points(5)
    recipe = recipe_of(data, Stated())
    return evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, env), data, 2).metrics


def test_a_metric_may_have_a_state_of_its_own() -> None:
    alone, (first, second) = measure_stated(ALONE), run_ranks(2, measure_stated)
    assert first == second == pytest.approx(alone)


@dataclass(slots=True)
class Slotted:
    """Without a dict of attributes, as a dataclass may be."""

    count: int = 0

    def reset(self) -> None:
        self.count = 0

    def update(self, outputs: Any, batch: Any) -> None:
        self.count += len(batch["target"])

    def merge(self, other: Slotted) -> None:
        self.count += other.count

    def compute(self) -> dict[str, float]:
        return {"slotted": self.count}


def measure_slotted(env: WorkerEnv) -> dict[str, float]:
    data = points(5)
    recipe = recipe_of(data, Slotted())
    return evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, env), data, 2).metrics


def test_a_metric_may_have_slots() -> None:
    assert measure_slotted(ALONE) == {"slotted": 5}
    assert run_ranks(2, measure_slotted) == [{"slotted": 5}] * 2


class Broken(Merged):
    """Fails in one of its methods."""

    names = ("broken",)

    def __init__(self, where: str, rank: int) -> None:
        super().__init__()
        self.where, self.rank, self.updated = where, rank, False
        self.pairs: list[Any] = [1]
        if "lock" in where:
            self.lock = threading.Lock()
        if where == "lock":
            self.reset = lambda: None

    def update(self, outputs: Any, batch: Any) -> None:
        self.updated = True
        if self.where == "lambda":
            self.function = lambda: None
        if self.where == "one rank" and self.rank == 2:
            self.pairs.append(Nameless())

    def __getstate__(self) -> Any:
        if self.where == "getstate" and self.rank == 1 and self.updated:
            raise ValueError("no state today")
        return vars(self)

    def merge(self, other: Any) -> None:
        if self.where == "merge":
            raise ValueError("no merge today")

    def compute(self) -> Any:
        if self.where == "compute":
            raise ValueError("no compute today")
        return {
            "text": {"broken": "half"},
            "shape": {"broken": torch.zeros(2)},
            "none": {"broken": None},
        }.get(self.where, {"broken": 0.5})


class RefusingFeed(Pairs):
    """Without merge; fails on what another rank has kept."""

    def update(self, outputs: Any, batch: Any) -> None:
        if self.rows:
            raise ValueError("no second batch today")
        self.rows.append([])


@contextlib.contextmanager
def guard(what: str, batch: Any) -> Any:
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{what} failed: {error}") from error


def with_odd_column(batch: Any) -> Any:
    return {**batch, "added": batch["target"], "odd": [threading.Lock()]}


def fail(env: WorkerEnv, where: str) -> str:
    data = points(6)
    metric = {"feed": RefusingFeed(), "column": Pairs()}.get(where) or Broken(where, env.rank)
    recipe = recipe_of(data, Perplexity(), metric)
    if where == "column":
        recipe = replace(recipe, eval_transform=with_odd_column)
    try:
        evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, env, guard=guard), data, 4)
    except LauncherError as error:
        return f"{type(error).__name__}: {error}"
    return ""


FAILURES = {
    "merge": "RecipeError: the metric Broken's merge failed: no merge today",
    "compute": "RecipeError: the metric Broken's compute failed: no compute today",
    "text": "ConfigError: the metric Broken's compute() must return one number",
    "shape": "ConfigError: the metric Broken's compute() must return one number",
    "none": "ConfigError: the metric Broken's compute() must return one number",
    "lambda": "ConfigError: the metric Broken has merge, but its state cannot be sent to rank 0: "
    "Can't pickle local object 'Broken.update.<locals>.<lambda>'. Numbers, text, bytes, ",
    "lock": "ConfigError: the metric Broken has merge, but its state cannot be sent to rank 0: ",
    "lock without reset": "ConfigError: the metric Broken cannot be copied (cannot pickle '_thread.lock' "
    "object), but each evaluation needs one without samples. Define reset() in its class.",
    "one rank": "ConfigError: the metric Broken has merge, but its state cannot be sent to rank 0: "
    "it has a tests.evaluation.test_measuring.Nameless. Numbers, ",
    "getstate": "RecipeError: the metric Broken's __getstate__ failed: no state today",
    "column": "ConfigError: the metrics without merge (Pairs) are updated on rank 0, but a batch cannot be "
    "sent to rank 0: cannot pickle '_thread.lock' object. Numbers, text, bytes",
    "feed": "RecipeError: the metric RefusingFeed's update failed: no second batch today",
    "": "",
}


def fail_in_turn(env: WorkerEnv) -> list[str]:
    """One group for all of them: after an error on all ranks the next evaluation must still be possible."""
    return [fail(env, where) for where in FAILURES]


def test_a_metric_that_fails_is_the_same_error_on_all_ranks() -> None:
    first, *others = run_ranks(3, fail_in_turn)
    for found, wanted in zip(first, FAILURES.values(), strict=True):
        assert found.startswith(wanted)
        assert bool(found) == bool(wanted)
    assert all(each == first for each in others)


class Nameless:
    def __init__(self, *names: str, **attributes: Any) -> None:
        self.given = names
        vars(self).update(attributes)

    def update(self, outputs: Any, batch: Any) -> None: ...

    def compute(self) -> Any:
        return dict.fromkeys(self.given, 0.5)


def named(*names: str, **attributes: Any) -> Nameless:
    return Nameless(*names, names=names, **attributes)


REFUSED: dict[str, tuple[list[Any], str | None, str]] = {
    "two with one name": (
        [Classification(CLASSES), named("accuracy")],
        None,
        "metrics Classification and Nameless both give the name 'accuracy'",
    ),
    "a name that is taken": ([named("loss")], None, "the metric Nameless gives the name 'loss', which every"),
    "a class": (
        [Classification],
        None,
        "has the class Classification, which is not a metric. A metric is an",
    ),
    "no metric": (["accuracy"], None, "has 'accuracy', which is not a metric"),
    "a function": ([with_odd_column], None, "has <function with_odd_column at .*>, which is not a metric"),
    "an unknown comparison": (
        [named("bleu", "chrf")],
        "bleau",
        "Nearest: bleu. They have val_loss, bleu, chrf",
    ),
}


@pytest.mark.parametrize(("metrics", "monitor", "text"), REFUSED.values(), ids=REFUSED)
def test_what_metrics_declare_is_checked_before_the_first_step(metrics, monitor, text) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        refuse_unusable_metrics(recipe_of(points(3), *metrics, monitor=monitor))


SETS: list[tuple[Any, str | None, str]] = [
    (
        {"near": points(3), "far": points(3)},
        "fra/a",
        "monitor=fra/a: .* Nearest: far/a. .* near/a, far/val_loss",
    ),
    ({}, None, "Recipe.validation has no set: give it at least one"),
    ({"near": points(3), "far": points(0)}, None, r"the validation \(far\) set of the recipe is empty"),
    ({"near/far": points(3)}, None, "'near/far' in Recipe.validation is not a valid name: .* without '/'"),
    ({"": points(3)}, None, "'' in Recipe.validation is not a valid name"),
    ({3: points(3)}, None, "3 in Recipe.validation is not a valid name"),
]


@pytest.mark.parametrize(("sets", "monitor", "text"), SETS)
def test_validation_sets_need_samples_and_names(sets, monitor, text) -> None:
    recipe = recipe_of(points(3), named("a"), validation=sets, monitor=monitor)
    refuse = refuse_unusable_metrics if monitor else refuse_unusable_data
    with pytest.raises((ConfigError, DataError), match=text):
        refuse(recipe)


def evaluated(*metrics: Any) -> Evaluation:
    data = points(6)
    recipe = recipe_of(data, *metrics)
    refuse_unusable_metrics(recipe)
    return evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, ALONE), data, 4)


def test_what_they_do_not_declare_is_checked_at_the_first_evaluation() -> None:
    with pytest.raises(ConfigError, match="metrics Nameless and Nameless both give the name 'a'"):
        evaluated(Nameless("a"), Nameless("b", "a"))
    with pytest.raises(ConfigError, match="gives the name 'epoch', which every evaluation has"):
        evaluated(Nameless("epoch"))
    with pytest.raises(ConfigError, match=r"monitor=bleau: .* Nearest: bleu. They have val_loss, bleu."):
        monitored_metric("bleau", {ONLY_SET: evaluated(Nameless("bleu"))})


@pytest.mark.parametrize(
    ("higher_is_better", "lower"),
    [(True, False), (False, True), ({"a": True}, False), ({"b": True}, None), (None, None), ("yes", None)],
)
def test_the_metric_that_is_compared_says_which_way_is_better(higher_is_better, lower) -> None:
    found = {ONLY_SET: evaluated(Nameless("a", higher_is_better=higher_is_better))}
    if lower is not None:
        assert monitored_metric("a", found).lower_is_better is lower
        return
    with pytest.raises(
        ConfigError, match=r"=a: its metric does not declare which way is better. Set higher_is_"
    ):
        monitored_metric("a", found)


def test_the_loss_is_compared_where_nothing_else_is_named() -> None:
    found = {ONLY_SET: evaluated(Nameless("a", higher_is_better=True))}
    assert monitored_metric(None, found).name == "val_loss"
    assert monitored_metric("val_loss", found).lower_is_better
    classes = evaluated(Classification(CLASSES, output="logits"))
    assert monitored_metric(None, {ONLY_SET: classes}).name == "accuracy"


def test_names_of_classes_are_shown_in_one_line_without_control_characters() -> None:
    names = ("evil\x1b[2J", "two\nlines", *CLASSES[2:])
    confusion = evaluated(Classification(names, output="logits")).confusion
    assert confusion is not None
    assert confusion.classes == ("evil\\x1b[2J", "two\\x0alines", *CLASSES[2:])


@pytest.mark.parametrize("outputs", [None, "text", {}, {"a": None}, 3.5])
def test_outputs_that_are_no_tensors_are_refused(outputs) -> None:
    data = points(6)
    recipe = recipe_of(data, Nameless("a"), loss=lambda network, batch: Loss(torch.ones(()), 1, outputs))
    with pytest.raises(ConfigError, match=r"recipe's metrics \(Nameless\) read outputs, but its loss gave "):
        evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, ALONE), data, 4)


@pytest.mark.parametrize("count", [1, 0, -1], ids=["NaN", "no loss", "less than none"])
def test_a_set_without_loss_is_refused_and_nan_among_outputs_gives_nan(count) -> None:
    def loss(network: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        outputs = network(batch["x"].float()).half()
        outputs[:, 1].masked_fill_(batch["label"] == 5, torch.nan)
        return Loss(outputs.float().nansum(), count * len(outputs), {"a": outputs, "b": outputs.argmax(1)})

    data = points(6)
    recipe = recipe_of(data, Classification(CLASSES, output="a"), loss=loss)
    if count < 1:
        with pytest.raises(DataError, match=f"no loss was counted for 6 samples .* add up to {count * 6}"):
            evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, ALONE), data, 4)
        return
    found = evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, ALONE), data, 4)
    assert all(np.isnan(value) for value in found.metrics.values())


class Resettable(Nameless):
    """Cannot be copied: it must be reset."""

    resets = 0

    def reset(self) -> None:
        self.resets += 1

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("copied")


def test_a_metric_that_can_be_reset_is_not_copied() -> None:
    metric = Resettable("a")
    evaluated(metric)
    evaluated(metric)
    assert metric.resets == 2


def test_a_metric_may_return_one_number_under_the_name_of_its_class() -> None:
    metric = Nameless()
    metric.compute = lambda: torch.tensor(0.25)
    assert evaluated(metric).metrics == {"Nameless": 0.25}
