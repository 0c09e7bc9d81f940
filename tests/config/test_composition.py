"""The YAML tree composes for every choice, and what the user asks for is checked before anything runs."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from launcher.config.composition import (
    Composer,
    Request,
    compose,
    resolved,
)
from launcher.config.groups import conf_dir, group_choices
from launcher.config.optimizers import OPTIMIZERS, GroupConfig
from launcher.config.resolve import compose_jobs, space_of
from launcher.config.schema import Config
from launcher.config.search_space import Choices, Space
from launcher.errors import ConfigError
from launcher.sweep.prepare import job_name, prepared

CHOICES = group_choices(conf_dir())


def composed(*overrides: str, **settings) -> Config:
    (config,) = compose_jobs(Request(overrides, **settings))
    return config


def problems(*overrides: str, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_jobs(Request(overrides, **settings))
    return str(caught.value)


def test_the_groups_are_those_of_the_design() -> None:
    groups = {"recipe", "model", "data", "optim", "schedule", "precision", "tracker", "sweep", "experiment"}
    assert CHOICES.keys() == groups
    residual = [name for name in CHOICES["recipe"] if name.startswith("resnet")]
    assert residual == ["resnet", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    assert set(CHOICES["precision"]) == {"fp32", "amp_fp16", "fp16", "pure_fp16", "bf16", "amp_bf16"}


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={name}"
        for group, names in CHOICES.items()
        if group not in ("experiment", "sweep")
        for name in names
    ],
)
def test_every_choice_gives_a_valid_config(choice: str) -> None:
    group, name = choice.split("=")
    config = composed(*{"recipe": "recipe=resnet18", group: choice}.values())
    chosen = getattr(config, group)
    assert chosen.name == {"recipe=resnet": "resnet18", "optim=sgd_nesterov": "sgd"}.get(choice, name)
    if group == "recipe":
        assert config.precision.name == "fp16"
    if choice.startswith("recipe=resnet"):
        assert (config.model.name, config.data.name) == (chosen.name, "digits")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_is_only_named_has_the_defaults_of_torch(name: str) -> None:
    """A script that is ported trains the same trajectory."""
    classes = {each.lower(): getattr(torch.optim, each) for each in dir(torch.optim)}
    defaults = dict(inspect.signature(classes[name]).parameters)
    if name == "muon":  # its eps is that of AdamW, which trains beside it
        defaults["eps"] = inspect.signature(torch.optim.AdamW).parameters["eps"]
    optim = composed("recipe=resnet18", f"optim={name}").optim
    lists = {key: tuple(value) if key == "betas" else value for key, value in optim.options.items()}
    options = {key: value for key, value in {"lr": optim.lr, **lists}.items() if key in defaults}
    assert options == {key: defaults[key].default for key in options}
    assert "weight_decay" in options


def test_the_command_line_has_the_last_word() -> None:
    config = composed("recipe=resnet18", "optim=adamw", "optim.lr=2", "data=synthetic", "data.num_samples=7")
    assert (config.optim.name, config.optim.lr) == ("adamw", 2.0)
    assert config.data.options == {"num_samples": 7, "image_size": 32, "num_classes": 10, "channels": 3}


def test_parameter_groups_are_a_list_on_the_command_line() -> None:
    config = composed(
        "recipe=resnet18",
        'optim.groups=[{match:"*.bias",weight_decay:0},{match:["fc.*","conv1.*"],lr_scale:0.5,frozen:true}]',
    )
    assert config.optim.groups == (
        GroupConfig(("*.bias",), 1.0, 0.0, False),
        GroupConfig(("fc.*", "conv1.*"), 0.5, None, True),
    )
    assert config.optim.decay_norm_and_bias


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("recipe=resnet81", "there is no such "),
        ("optim.lrr=1", "there is no such "),
        ("lr=1", "there is no such "),
        ("optim.betas=[0.9,0.9]", "this key belongs to"),
        ("~optim.lr", "keys cannot be deleted"),
        ("optim._target_=os.system", "there is no such key"),
        ("tracker.project=${oc.env:MY_TOKEN}", "MY_TOKEN is named"),
        ("tracker.project='${oc.env:\"MY_TOKEN\"}'", "MY_TOKEN is named"),
        ("seed=${oc.env:NOT_THERE}", "Environment variable 'NOT_THERE' not found"),
        ("hydra.searchpath=[file:///own]", "--config-dir DIR"),
        ("hydra/launcher=basic", "not used here"),
        ("hydra.sweeper.n_trials=20", "sweep=random and sweep=tpe"),
        ("optim.lr=0.1,0.2", "several values need a sweep"),
        ("x=[", "cannot be read"),
        ("run.dir=runs/lr=0.1", "is quoted"),
        ("seed=", "a whole number"),
        ('optim.groups=[{match:"*",weight_decy:0}]', "there is no such "),
        ("data.path=no/where", "there is no such "),
    ],
)
def test_a_wrong_override_is_refused_with_its_reason(override: str, words: str) -> None:
    recipe = () if override.startswith("recipe=") else ("recipe=resnet18",)
    text = problems(*recipe, override)
    assert text.startswith(re.match(r"[+~]*[\w.]+", override)[0])
    assert words in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "value",
    [
        "runs/lr=0.1",
        "it's",
        'a"b',
    ],
)
def test_the_quoted_form_of_a_value_is_the_value(value: str) -> None:
    text = problems("recipe=resnet18", f"tracker.run_name={value}")
    (word,) = shlex.split(text.rpartition("for the shell: ")[2])
    (job,) = compose_jobs(Request(("recipe=resnet18", word)))
    assert job.tracker.run_name == value


def test_all_kinds_of_problems_are_told_together_and_once() -> None:
    wrong = ("recipe=resnet81", "optim.lrr=1", "unknown=1", "train.epochs=-3", "data.batch_size=0", "~seed")
    lines = problems(*wrong).splitlines()
    assert lines[0] == "6 problems:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(wrong)


def test_a_recipe_must_be_chosen() -> None:
    text = problems()
    assert text.startswith("recipe: ")
    assert ", ".join(CHOICES["recipe"]) in text


def test_paths_become_absolute_where_the_user_is(tmp_path, monkeypatch) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    config = composed("recipe=resnet18", "data=cifar10", "data.path=images")
    assert config.data.path == str(tmp_path.resolve() / "images")


def test_a_sweep_has_all_combinations_in_hydras_order() -> None:
    request = Request(("optim.lr=0.1,0.2", "recipe=resnet18", "seed=range(3)"), multirun=True)
    configs = compose_jobs(request)
    assert [(config.optim.lr, config.seed) for config in configs] == list(product((0.1, 0.2), (0, 1, 2)))
    assert [each.key for each in space_of(request.overrides).dimensions] == ["optim.lr", "seed"]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["optim.lr=0.1,fast"], ["optim.lr=fast: must be "]),
        (
            ["optim=sgd,adamw", "optim.momentum=0.9"],
            ["optim.momentum=0.9: ", "optim=rmsprop, optim=sgd and optim=sgd_nesterov"],
        ),
        (["run.dir=a,b"], ["run.dir=a,b: "]),
        (["optim.lr=interval(0,1)"], ["optim.lr=interval(0,1): "]),
    ],
)
def test_a_sweep_is_refused_for_any_of_its_jobs(overrides: list[str], lines: list[str]) -> None:
    text = problems("recipe=resnet18", *overrides, multirun=True)
    assert all(line in text for line in lines)
    assert text.count("there is no such key") in (0, len(lines))


COMPOSED = {
    "choices": ["optim=adamw", "data=cifar10", "precision=bf16", "recipe=cnn"],
    "a choice and its keys": ["optim=adamw", "optim.betas=[0.8,0.9]", "optim.lr=1e-3"],
    "a section": [
        "data.augment={random_crop_padding:2,random_horizontal_flip:true}",
        "precision.loss_scale={mode:static,init_scale:128}",
    ],
    "a section of a group": ["optim={lr:0.5}", "tracker=none", "tracker={tags:[a,b]}"],
    "lists": ["tracker.tags=[a,'b c']", "optim.groups=[{match:'*.bias',weight_decay:0}]"],
    "references": [
        "optim.lr=2",
        "tracker.group='${seed} of ${optim.lr}'",
        "train.eval_every_steps=${train.epochs}",
    ],
    "references to none": ["tracker.group='${train.max_steps}-${tracker.tags}'", "seed='${train.max_steps}'"],
    "relative references": ["optim.lr=${..seed}", "precision.loss_scale.init_scale=${.min_scale}"],
    "a reference named by another": ["tracker.group='${optim.${tracker.notes}}'", "tracker.notes=lr"],
    "escaped": ["tracker.group='\\${seed}'", "tracker.run_name='a\\\\b ${seed}'"],
    "a reference to a reference": ["tracker.group=${seed}", "tracker.run_name=${tracker.group}"],
    "numbers that look alike": ["seed=1e1", "optim.lr=1", "optim.momentum=nan", "tracker.group='1'"],
    "interpolations": ["seed=3", "train.eval_every_steps=${seed}", "tracker.group=run-${optim.lr}"],
    "an interpolation to another choice": ["model=resnet34", "tracker.run_name=${model.name}"],
    "environment": ["tracker.group=${oc.env:NOT_SET_HERE,a group}"],
    "twice": ["optim.lr=1", "optim=sgd", "optim.lr=2"],
    "null": ["optim.clip_norm=null", "train.max_steps=null"],
    "an own choice": ["recipe=mine", "model.width=64", "optim=mine"],
}


def hydras_own(request: Request, overrides: Sequence[str]) -> dict[str, object]:
    return resolved(OmegaConf.create(OmegaConf.to_container(compose(request, overrides))))


@pytest.fixture
def own_request(tmp_path) -> Request:
    tree = own_tree(tmp_path, OWN_RECIPE + "train: {epochs: '${oc.env:NOT_SET_HERE,7}'}\n")
    (tree / "optim").mkdir()
    (tree / "optim" / "mine.yaml").write_text("defaults: [sgd, _self_]\nmomentum: 0.5\n")
    return Request((), config_dir=tree)


@pytest.mark.slow
def test_values_on_a_copy_of_the_choices_give_the_tree_that_hydra_composes(own_request) -> None:
    composer = Composer(own_request)
    for overrides in COMPOSED.values():
        lines = ("recipe=resnet18", *overrides)
        assert repr(composer.resolved(lines)) == repr(hydras_own(own_request, lines)), overrides
    assert len(composer.bases) < len(COMPOSED)


@pytest.mark.parametrize(
    ("number", "overrides", "name"),
    [
        (0, "optim.lr=0.1,seed=3", "0_optim.lr=0.1,seed=3"),
        (1, "data.path=../../etc/passwd", "1_data.path=..-..-etc-passwd"),
        (3, "tracker.project='a b\n$(c)'", "3_tracker.project=-a-b-c-"),
        (4, "a=" + "x" * 200, "4_a=" + "x" * 96),
    ],
)
def test_a_job_directory_is_a_plain_short_name(number: int, overrides: str, name: str) -> None:
    lines = overrides.split(",")
    space = Space(("recipe=resnet18", *(Choices(line.partition("=")[0], ()) for line in lines)))
    assert job_name(space, number, ("recipe=resnet18", *reversed(lines))) == name


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("settings", "directories"),
    [
        ((), ["multirun/resnet18/*/0_optim.lr=0.1", "multirun/resnet18/*/1_optim.lr=0.2"]),
        (
            ("hydra.sweep.dir=mine/${recipe.name}",),
            ["mine/resnet18/0_optim.lr=0.1", "mine/resnet18/1_optim.lr=0.2"],
        ),
    ],
)
def test_a_sweep_runs_the_checked_jobs_in_directories_of_their_own(
    tmp_path, monkeypatch, settings, directories
) -> None:
    monkeypatch.chdir(tmp_path)
    request = Request(("recipe=resnet18", "optim.lr=0.1,0.2", "tracker=none", *settings), multirun=True)
    configs = compose_jobs(request)
    with prepared(request, configs) as (sweep, record, placed):
        assert [job.overrides for job in record.jobs] == [
            ("recipe=resnet18", f"optim.lr={rate}", "tracker=none") for rate in (0.1, 0.2)
        ]
        for config, checked, directory in zip(placed, configs, directories, strict=True):
            assert Path(config.run.dir).is_dir()
            assert Path(config.run.dir).relative_to(tmp_path).match(directory)
            assert config.tracker.group == sweep.name
            unplaced = dataclasses.replace(config, run=checked.run, tracker=checked.tracker)
            assert unplaced == checked


OWN_RECIPE = """
# @package _global_
defaults:
  - override /model: null
  - override /data: cifar10
recipe: {name: mine, uses: cnn}
model: {name: tiny, width: 32}
"""


def own_tree(directory: Path, text: str, name: str = "mine") -> Path:
    (directory / "recipe").mkdir(parents=True, exist_ok=True)
    (directory / "recipe" / f"{name}.yaml").write_text(text)
    return directory


def test_a_recipe_of_ones_own_comes_with_its_own_keys(tmp_path) -> None:
    tree = own_tree(tmp_path / "it's mine", OWN_RECIPE)
    config = composed("recipe=mine", "model.width=64", config_dir=tree)
    assert (config.recipe.name, config.model.name, config.model.options) == ("mine", "tiny", {"width": 64})
    assert config.data.name == "cifar10"
    assert "model.widht=1: there is no such key. Nearest: model.width" in problems(
        "recipe=mine", "model.widht=1", config_dir=tree
    )


@pytest.mark.parametrize("group", ["recipe", "experiment"])
def test_a_file_for_the_whole_config_that_does_not_say_so_is_told_what_to_write(tmp_path, group) -> None:
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text("optim: {lr: 0.5}\nrecipe: {name: mine, uses: cnn}\n")
    told = problems("recipe=cnn", f"{group}=mine", config_dir=tmp_path)
    assert told.endswith("its first line is `# @package _global_`.")


def test_a_key_is_not_looked_for_in_a_file_that_is_no_yaml(tmp_path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "broken.yaml").write_text("lr: [")
    (tmp_path / "optim" / "list.yaml").write_text("- 1")
    told = problems("recipe=cnn", "optim.nosuch=3", config_dir=tmp_path)
    assert "broken.yaml is not valid YAML" in told
    (tmp_path / "optim" / "broken.yaml").unlink()
    assert "optim.nosuch=3: there is no such key" in problems(
        "recipe=cnn", "optim.nosuch=3", config_dir=tmp_path
    )


def test_a_key_of_one_group_of_parameters_is_told_how_groups_are_set() -> None:
    assert "optim.groups is one list, set as a whole" in problems("recipe=cnn", "optim.groups.0.lr=3")


def test_an_unknown_recipe_names_the_form_of_ones_own() -> None:
    assert problems("recipe=rings").endswith("A recipe of your own is chosen by its file: recipe=rings.py")


@pytest.mark.parametrize(
    ("group", "text", "missing", "base"),
    [
        ("optim", "name: adamw\nlr: 0.1\n", "optim.eps", "adamw"),
        ("tracker", "", "tracker.name", "wandb"),
    ],
)
def test_a_group_file_that_leaves_keys_out_learns_how_to_inherit_them(
    tmp_path, group, text, missing, base
) -> None:
    (tmp_path / group).mkdir()
    file = tmp_path / group / "mine.yaml"
    file.write_text(text)
    told = problems("recipe=resnet18", f"{group}=mine", config_dir=tmp_path)
    assert f"{missing}: the key is missing. A file of your own in {group}/ inherits it" in told
    assert "with `defaults: [NAME, _self_]` at its top" in told
    file.write_text(f"defaults: [{base}, _self_]\n{text}")
    composed("recipe=resnet18", f"{group}=mine", config_dir=tmp_path)


@pytest.mark.parametrize(
    ("addition", "reason"),
    [
        ("train: {_target_: os.system}", "train._target_: there is no such key"),
        ("tracker: {project: '${oc.env:WANDB_API_KEY}'}", "WANDB_API_KEY is named like a credential"),
        ("tracker: {project: !!python/object/apply:os.getcwd []}", "cannot be composed"),
        ("trian: {epochs: 3}", "trian: there is no such key. Nearest: train."),
        ("train: [", "cannot be composed"),
    ],
)
def test_a_hostile_or_wrong_file_is_refused(tmp_path, addition: str, reason: str, monkeypatch) -> None:
    monkeypatch.setenv("CANARY", "a-secret-value")
    base = "# @package _global_\nrecipe: {name: mine, uses: cnn}\n"
    text = problems("recipe=mine", config_dir=own_tree(tmp_path, base + addition + "\n"))
    assert reason in text
    assert "a-secret-value" not in text


@pytest.mark.parametrize(
    "key", ["gradient_accumulation_steps", "train.accumulate_grad_batches", "grad_accum_steps"]
)
def test_gradient_accumulation_is_found_by_the_names_it_has_elsewhere(key) -> None:
    text = problems("recipe=resnet18", f"{key}=4")
    assert text.startswith(f"{key}=4: there is no such key. Gradient accumulation follows from two sizes")
    assert "data.micro_batch_size" in text


@pytest.mark.parametrize(
    ("word", "multirun", "advice"),
    [
        ("run.dir=123", False, """To give 123 as text: 'run.dir="123"'."""),
        ("tracker.notes=true", False, """To give true as text: 'tracker.notes="true"'."""),
        ("tracker.run_name=a(b,c", False, """for the shell: 'tracker.run_name="a(b,c"'"""),
    ],
)
def test_the_quotes_that_a_text_needs_are_in_the_error(word: str, multirun: bool, advice: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose_jobs(Request(("recipe=resnet18", word), multirun=multirun))
    assert str(refusal.value).endswith(advice)


@pytest.mark.parametrize(
    ("words", "warmup"),
    [
        (["recipe=resnet18", "schedule=constant"], 0),
        (["recipe=resnet18", "schedule=constant", "schedule.warmup_fraction=0.1"], 0.1),
        (["recipe=resnet18", "schedule=linear"], 0.2),
    ],
)
def test_a_constant_schedule_warms_up_only_where_that_is_asked_for(words: list[str], warmup: float) -> None:
    (config,) = compose_jobs(Request(tuple(words)))
    assert config.schedule.warmup_fraction == warmup


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["optim.lr"], "has no value"),
        (["optim.lr=${optm.lr}"], "'optm.lr' not found"),
    ],
)
def test_what_newcomers_type_is_answered_with_what_to_type(typed: list[str], words: str) -> None:
    multirun = any("," in word for word in typed)
    assert words in problems("recipe=resnet18", *typed, multirun=multirun)
