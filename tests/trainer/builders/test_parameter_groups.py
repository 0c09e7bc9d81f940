"""How a config's and a recipe's groups and the decay of vectors combine; what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from launcher.config.optimizers import GroupConfig, OptimConfig
from launcher.engine import SGD, ParameterGroup, Stepper
from launcher.errors import ConfigError
from launcher.trainer.builders.parameter_groups import parameter_groups
from tests.configs import composed
from tests.models import conv_net

DECAY = composed().optim.weight_decay


def optim(*groups: GroupConfig, **options) -> OptimConfig:
    return replace(composed().optim, groups=groups, **options)


def group(match: str, lr_scale: float = 1.0, weight_decay: float | None = None, frozen: bool = False):
    return GroupConfig((match,), lr_scale, weight_decay, frozen)


class Encoder(nn.Module):
    """The names of an encoder with a head; small."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(5, 4)
        self.model.norm = nn.LayerNorm(4)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(layers)]
        self.model.layer = nn.ModuleList(blocks)
        self.model.pooler = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)


def rates(settings: OptimConfig, model: nn.Module, own: tuple[ParameterGroup, ...] = ()) -> dict[str, tuple]:
    """(lr_scale, weight_decay) by parameter, as a Stepper understands the groups; None where it is frozen."""
    groups, _ = parameter_groups(settings, own, model)
    grouping = Stepper(model, SGD(0.1), groups=groups).layout.grouping
    found = {name: grouping.options_of(name) for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys().isdisjoint(grouping.frozen)
    return {name: (each.lr_scale, each.weight_decay) for name, each in found.items()}


@pytest.mark.parametrize(
    "settings",
    [
        optim(),
        optim(group("*", weight_decay=DECAY)),
        optim(decay_norm_and_bias=False, options={"weight_decay": 0.0}),
    ],
)
def test_what_the_optimizer_does_anyway_gives_no_groups(settings) -> None:
    assert parameter_groups(settings, (), Encoder()) == ([], "")


def test_vectors_without_decay_are_norms_and_biases() -> None:
    model = conv_net()
    found = rates(optim(decay_norm_and_bias=False), model)
    assert found == {n: (1.0, 0.0 if p.ndim <= 1 else None) for n, p in model.named_parameters()}
    _, sentence = parameter_groups(optim(decay_norm_and_bias=False), (), conv_net())
    assert sentence == "5 of 8 parameters with weight decay 0"


def test_the_first_group_has_a_parameter_and_the_configs_come_before_the_recipes() -> None:
    """A group without a decay leaves that of vectors to optim.decay_norm_and_bias; one with a decay not."""
    configured = (group("head.weight", 5.0), group("model.layer.0.*", weight_decay=0.2))
    own = (ParameterGroup("head.*", 10.0), ParameterGroup("model.embeddings.*", frozen=True))
    settings = optim(*configured, decay_norm_and_bias=False)
    found = rates(settings, Encoder(2), own)
    assert "model.embeddings.weight" not in found
    assert {each for name, each in found.items() if "layer.0." in name} == {(1.0, 0.2)}
    assert found["model.layer.1.0.weight"] == found["model.pooler.weight"] == (1.0, None)
    assert found["model.layer.1.0.bias"] == found["model.norm.weight"] == (1.0, 0.0)
    assert (found["head.weight"], found["head.bias"]) == ((5.0, None), (10.0, 0.0))
    _, sentence = parameter_groups(settings, own, Encoder(2))
    assert sentence == (
        "7 of 14 parameters with weight decay 0; 4 of 14 parameters with weight decay 0.2; 1 at 5 x lr; "
        "1 at 10 x lr; 1 frozen"
    )


def test_the_configs_groups_may_take_all_that_one_of_the_recipes_has() -> None:
    found = rates(optim(group("head.*", 2.0)), Encoder(1), (ParameterGroup("head.bias", 7.0),))
    assert found["head.bias"] == (2.0, None)


@pytest.mark.parametrize(
    ("settings", "own", "text"),
    [
        (optim(group("haed.*")), (), r"^optim\.groups\[0\]: the pattern 'haed\.\*' .* Nearest: head"),
        (optim(), (ParameterGroup("*.wieght"),), r"^Recipe\.groups\[0\]: the pattern .* Nearest: .*weight"),
        (
            optim(group("head.*"), group("head.bias")),
            (),
            r"^optim\.groups\[1\] \(head.bias\) is left without a parameter",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(settings, own, text) -> None:
    with pytest.raises(ConfigError, match=text):
        parameter_groups(settings, own, Encoder())
