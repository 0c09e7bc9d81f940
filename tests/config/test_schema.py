"""Every key has a constraint, every constraint can refuse, and a config travels unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.groups import choice_values, conf_dir
from launcher.config.messages import nearest
from launcher.config.optimizers import OPTIMIZERS, OPTION_CONSTRAINTS, OptimConfig
from launcher.config.schema import Config, constraints, from_dict, paths_of, to_dict, types_of
from launcher.config.validation import parse
from launcher.errors import ConfigError
from tests.configs import composed


def changed(**values: Any) -> dict[str, Any]:
    """A valid tree as YAML gives it, with these values; a key's dots are written as two underscores."""
    tree = to_dict(composed("data=synthetic")) | {"run": {"dir": None}}
    for key, value in values.items():
        *sections, last = key.split("__")
        target = tree
        for section in sections:
            target = target[section]
        target[last] = value
    return tree


def test_the_valid_tree_is_valid() -> None:
    config = parse(changed(data__num_samples=100, launch__hang_timeout_s=300))
    assert config == composed("data=synthetic", "data.num_samples=100")
    assert config.data.options["num_samples"] == 100
    assert config.run.dir == ""
    assert isinstance(config.launch.hang_timeout_s, float)


def described(file: Path) -> dict[str, bool]:
    """Each key of a YAML file by its dotted path, and whether it has a comment: in its line, or above."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found: dict[str, bool] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in ("defaults", "hydra"):
                continue
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                walk(value, f"{prefix}{key.value}.")
            else:
                line = key.start_mark.line
                above = lines[line - 1].strip().startswith("#") and (line > 1 or not prefix)
                found[f"{prefix}{key.value}"] = " # " in lines[line] or above

    walk(yaml.compose(file.read_text(encoding="utf-8")), "")
    return found


def test_every_key_has_words_in_one_yaml() -> None:
    """In config.yaml; a key that it lacks in one file of its group. A choice's own name needs none."""
    primary = described(conf_dir() / "config.yaml")
    keys = constraints().keys()
    assert {path for path in primary if not primary[path]} == set()
    assert primary.keys() <= keys
    for path in keys - primary.keys():
        group, _, key = path.partition(".")
        files = [described(file) for file in sorted((conf_dir() / group).glob("*.yaml"))]
        assert any(key in found for found in files), path
        assert key == "name" or sum(found.get(key, False) for found in files) == 1, path


def test_a_choice_has_no_key_that_the_schema_lacks() -> None:
    for name, optimizer in OPTIMIZERS.items():
        keys = choice_values([conf_dir()], "optim", name).keys() - {"defaults"}
        assert keys - types_of(OptimConfig).keys() == set(optimizer.keys), name
    for group in ("schedule", "precision", "tracker"):
        for file in (conf_dir() / group).glob("*.yaml"):
            assert {f"{group}.{key}" for key in described(file)} <= constraints().keys()


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"train__epochs": -3}, "train.epochs", ""),
        ({"train__epochs": "ten"}, "train.epochs", ""),
        ({"data__batch_size": 0}, "data.batch_size", ""),
        (
            {"data__micro_batch_size": "auto", "model__sync_bn": True},
            "model.sync_bn",
            "excludes data.micro_batch_size=auto",
        ),
        ({"data__augment": None}, "data.augment", "must be a section"),
        ({"optim__lr": float("nan")}, "optim.lr", ""),
        ({"precision__outlier_window": 64}, "precision.outlier_window", "is the window of"),
        ({"train__compile": "blocks"}, "train.compile", ""),
        ({"model__sync_bn": True, "train__compile": True}, "model.sync_bn", "excludes train.compile=true"),
        (
            {"precision__fp32_modules": ["fc"], "train__compile": True},
            "precision.fp32_modules",
            "excludes train.compile=true, because",
        ),
        ({"optim__momentum": 1}, "optim.momentum", ""),
        ({"optim__momentum": 0}, "optim.nesterov", "needs optim.momentum above 0"),
        ({"model__init_from_sha256": "0" * 64}, "model.init_from_sha256", "is that of a"),
        (
            {"precision__loss_scale__min_scale": 131072},
            "precision.loss_scale.init_scale",
            "must lie between precision.loss_scale.min_scale=131072",
        ),
        (
            {"train__activation_checkpointing": True, "train__compile": True},
            "train.activation_checkpointing",
            "excludes train.compile=true",
        ),
        ({"optim__groups": ["*.bias"]}, "optim.groups[0]", "must be a mapping"),
        (
            {"optim__groups": [{"match": "a"}, {"match": "b", "lrscale": 2}]},
            "optim.groups[1].lrscale",
            "there is no such key. Nearest: ",
        ),
        ({"precision__loss_scale__init_scale": 1000}, "precision.loss_scale.init_scale", ""),
        ({"ddp__gradient_predivide_factor": 3}, "ddp.gradient_predivide_factor", ""),
        ({"tracker__tags": "a"}, "tracker.tags", ""),
        ({"recipe__name": "../../etc"}, "recipe.name", ""),
        ({"trian": {"epochs": 1}}, "trian", "there is no such key. Nearest: "),
    ],
)
def test_what_is_wrong_is_named_with_its_constraint(changes: dict[str, Any], key: str, words: str) -> None:
    """`words` are of the constraint; none where it is the key's own."""
    with pytest.raises(ConfigError) as caught:
        parse(changed(**changes))
    text = str(caught.value)
    assert text.startswith((f"{key}=", f"{key}: "))
    assert (words or f": must be {constraints()[key].text}.") in text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("early_stopping.patience", 2), ("reduce_lr_on_plateau.factor", 0.5), ("sweep.prune", "asha")],
)
def test_what_decides_by_evaluations_is_refused_where_the_only_one_is_at_the_end(
    key: str, value: object
) -> None:
    given = {key.replace(".", "__"): value, "schedule__name": "constant", "schedule__warmup_fraction": 0}
    parse(changed(**given, train__epochs=8, train__eval_every_epochs=7))
    parse(changed(**given, train__epochs=8, train__eval_every_epochs=8, train__eval_every_steps=5))
    with pytest.raises(ConfigError) as caught:
        parse(changed(**given, train__epochs=8, train__eval_every_epochs=8))
    assert str(caught.value).startswith(f"{key}=")
    assert "leaves only that at its end" in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(train__epochs=0, data__batch_size=0, seed=-1, precision__loss_scale__max_scale=3))
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems:"
    assert [line.split("=")[0].strip() for line in lines[1:]] == [
        "seed",
        "data.batch_size",
        "train.epochs",
        "precision.loss_scale.max_scale",
    ]


def test_a_missing_key_is_named() -> None:
    tree = changed()
    del tree["ddp"]["overlap"]
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    assert str(caught.value).startswith("ddp.overlap: the key is missing")


@pytest.mark.parametrize("path", sorted(constraints()))
def test_every_constraint_refuses_something(path: str) -> None:
    wrong = object()
    assert not constraints()[path].is_valid(wrong)


scales = st.integers(0, 20).map(lambda exponent: 2**exponent)


@given(
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(1e-9, 1e3) | st.integers(1, 10),
    batch_size=st.integers(1, 10**6),
    options=st.dictionaries(
        st.text("abc_", min_size=1), st.integers() | st.text("é0: '") | st.booleans() | st.none()
    ),
    tags=st.lists(st.text("xyz", min_size=1)),
    scale=st.tuples(scales, scales, scales).map(sorted),
    adamw=st.booleans(),
)
def test_a_config_survives_json(seed, lr, batch_size, options, tags, scale, adamw) -> None:
    low, init, high = scale
    tree = changed(
        seed=seed,
        data__batch_size=batch_size,
        tracker__tags=tags,
        precision__loss_scale__min_scale=low,
        precision__loss_scale__init_scale=init,
        precision__loss_scale__max_scale=high,
    )
    tree["model"] |= {f"own_{key}": value for key, value in options.items()}
    if adamw:
        del tree["optim"]["momentum"], tree["optim"]["nesterov"]
        tree["optim"] |= {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "clip_norm": 1}
        tree["optim"]["groups"] = [{"match": "*.bias", "weight_decay": 0}, {"match": ["a", "b"]}]
    tree["optim"]["lr"] = lr
    config = parse(tree)
    assert isinstance(config, Config)
    assert ("betas" in config.optim.options) is adamw
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    unused = {f"optim.{key}" for key in OPTION_CONSTRAINTS} - set(paths_of(to_dict(config)))
    assert constraints().keys() - set(paths_of(to_dict(config))) == unused


@pytest.mark.parametrize(
    ("word", "valid", "best"),
    [
        ("optim.lrr", ["optim.lr", "optim.name", "ddp.gradient_dtype"], ["optim.lr"]),
        ("lr", ["optim.lr", "optim.name"], ["optim.lr"]),
        ("batchsize", ["data.batch_size", "data.path"], ["data.batch_size"]),
        ("resnet81", ["resnet18", "resnet34"], ["resnet18", "resnet34"]),
        ("completely", ["other", "things"], []),
    ],
)
def test_the_nearest_names_are_those_that_one_meant(word: str, valid: list[str], best: list[str]) -> None:
    assert nearest(word, valid)[: len(best)] == best
    assert bool(nearest(word, valid)) is bool(best)
