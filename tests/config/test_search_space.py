"""What a sweep varies: dimensions from Hydra's syntax, points of a space, and what is refused."""

from __future__ import annotations

import math
import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.config.composition import Composer, Request
from launcher.config.resolve import compose_jobs, compose_one
from launcher.config.search_space import Choices, Interval, Space
from launcher.errors import ConfigError

RECIPE = "recipe=resnet18"


def space(*lines: str) -> Space:
    return Space.of(OverridesParser.create().parse_overrides(list(lines)))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a=interval(0,1)", Interval("a", 0, 1, log=False, whole=False)),
        ("a=tag(log,interval(1e-4,1))", Interval("a", 1e-4, 1, log=True, whole=False)),
        ("a=int(interval(1,9))", Interval("a", 1, 9, log=False, whole=True)),
        ("a=int(tag(log,interval(1,100)))", Interval("a", 1, 100, log=True, whole=True)),
        ("a=choice(x,y)", Choices("a", ("x", "y"))),
        ("a=1,2", Choices("a", ("1", "2"))),
        ("a=[1,2],[3]", Choices("a", ("[1,2]", "[3]"))),
        ("a=range(1,8,3)", Choices("a", ("1", "4", "7"))),
    ],
)
def test_hydras_syntax_becomes_a_dimension(line: str, expected: object) -> None:
    assert space("b=1", line).dimensions == [expected]


def test_equal_jobs_of_a_grid_are_one() -> None:
    found = space("a=1,2,1")
    assert found.grid() == [("a=1",), ("a=2",)]


def test_the_grid_is_hydras_product() -> None:
    found = space("a=1,2", "c=x", "b=u,v")
    assert list(found.grid()) == [
        ("a=1", "c=x", "b=u"),
        ("a=1", "c=x", "b=v"),
        ("a=2", "c=x", "b=u"),
        ("a=2", "c=x", "b=v"),
    ]
    assert found.size == 4


@pytest.mark.parametrize("line", ["a=int(interval(1,3))", "a=int(tag(log,interval(1,3)))"])
def test_whole_numbers_of_an_interval_are_all_drawn_and_no_others(line: str) -> None:
    (each,) = space(line).dimensions
    shares = [number / 1000 for number in range(1000)]
    drawn = [each.sample(share) for share in shares]
    assert {*drawn} == {"1", "2", "3"}
    if not each.log:
        assert all(320 <= drawn.count(value) <= 345 for value in "123"), "each is as likely"


def test_samples_have_every_choice_and_both_ends() -> None:
    found = [*space("a=1,2,3", "b=interval(0,1)", "c=x").samples()]
    assert found == [("a=1", "b=0.0", "c=x"), ("a=2", "b=1.0", "c=x"), ("a=3", "b=0.0", "c=x")]
    assert [*space("c=x").samples()] == [("c=x",)]
    assert space("a=interval(0,1)").size == math.inf


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["optim.lr=interval(1e-4,1e-1)"], "a grid lists its values"),
        (["sweep.name=random"], "nothing is searched"),
        (["sweep.name=random", "optim.lr=interval(1e-1,1e-4)"], "from its lower end to its higher one"),
        (["sweep.name=random", "optim.lr=tag(log,choice(0.1,0.2))"], "the only tag is log, of an interval"),
        (["sweep.name=random", "optim.lr=interval(0,inf)"], "both finite"),
        (["sweep.name=tpe", "optim.lr=interval(-1,1)"], "must be a number above 0"),
        (
            ["sweep.name=random", "data.batch_size=interval(8,64)"],
            "data.batch_size=8.0: must be",
        ),
        (["seed=range(0,1000000000)"], "a sweep has at most 2,000"),
        (["seed=range(5,5)"], "has no values"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_before_any_job(words, rule) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)):
        compose_jobs(Request((RECIPE, *words), multirun=True))


def test_a_search_is_checked_at_its_ends_and_then_job_by_job() -> None:
    request = Request(
        (RECIPE, "sweep.name=random", "optim.lr=interval(0.1,0.5)", "seed=1,2,3"), multirun=True
    )
    found = compose_jobs(request)
    assert [(config.optim.lr, config.seed) for config in found] == [(0.1, 1), (0.5, 2), (0.1, 3)]
    config = compose_one(Composer(request), (RECIPE, "sweep.name=random", "optim.lr=0.25", "seed=7"))
    assert (config.optim.lr, config.seed) == (0.25, 7)
    with pytest.raises(ConfigError, match="optim"):
        compose_one(Composer(request), (RECIPE, "optim.lr=-1"))
