"""`recipe=cnn` and its variant for large batches, on data that every machine has."""

from __future__ import annotations

import pytest
import torch

from launcher.errors import ConfigError
from launcher.recipe import load_recipe, registry_of
from launcher.telemetry.event_log import read_events
from launcher.trainer.builders.build import lr_table
from tests.configs import composed
from tests.forked import launch_forked


def build(num_classes: int = 10, in_channels: int = 3, height: int = 32, width: int = 32):
    return registry_of(None).models["cnn"](num_classes, in_channels, height, width)


def test_it_is_two_convolutions_and_one_dense_layer() -> None:
    network = build()
    shapes = [tuple(parameter.shape) for name, parameter in network.named_parameters() if "weight" in name]
    assert shapes == [(64, 3, 3, 3), (128, 64, 3, 3), (10, 128 * 8 * 8)]


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 4, 4), (1, 8, 8), (3, 5, 11), (3, 64, 32)])
def test_images_may_have_any_size_from_4_x_4(channels, height, width) -> None:
    assert build(7, channels, height, width)(torch.zeros(2, channels, height, width)).shape == (2, 7)


@pytest.mark.parametrize(("height", "width"), [(3, 32), (32, 3), (1, 1)])
def test_smaller_images_are_refused(height, width) -> None:
    with pytest.raises(ConfigError, match=rf"the images have {height} x {width} pixels.*at least 4 x 4"):
        build(height=height, width=width)


SMALL = ["data.image_size=12", "data.num_samples=512", "data.batch_size=32", "schedule.lr_base_batch_size=64"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=cnn", "data=digits", "train.epochs=2"], "64 samples per update over 2"),
        pytest.param(
            ["recipe=cnn_large_batch", "data=synthetic", *SMALL],
            "0.0005: optim.lr=0.001 x data.batch_size=32",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_learns_on_two_ranks(words, said, tmp_path) -> None:
    fixed = ["launch.nproc=2", "tracker=none", "run.dir=run", "train.log_every_steps=100"]
    done = launch_forked(tmp_path, [*words, *fixed])
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    (*_, last) = (e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "eval")
    assert last["accuracy"] > 0.8


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("words", "peak"),
    [
        (["recipe=cnn"], 1e-3),
        (["recipe=cnn", "data.batch_size=1024"], 1e-3),
        (["recipe=cnn_large_batch"], 4e-3),
        (["recipe=cnn_large_batch", "data.batch_size=2048"], 8e-3),
        (["recipe=cnn_large_batch", "data.batch_size=64"], 2.5e-4),
        (["recipe=cnn_large_batch", "optim=sgd", "optim.lr=0.1", "data.batch_size=512"], 0.2),
        (["recipe=cnn_large_batch", "schedule=onecycle", "data.batch_size=512"], 2e-3),
    ],
)
def test_the_large_batch_scales_the_rate_and_warms_up(words, peak) -> None:
    config = composed(*words)
    rates = lr_table(config, load_recipe(composed("recipe=cnn", "data=digits")), total_steps=100)
    assert max(rates) == pytest.approx(peak)
    warmup = 20 if "recipe=cnn_large_batch" in words else 0
    if warmup and "schedule=onecycle" not in words:
        assert rates[:warmup] == pytest.approx([peak * (step + 1) / warmup for step in range(warmup)])
    assert all(later <= earlier for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "auto"])
def test_a_base_batch_is_a_number_of_samples(value) -> None:
    with pytest.raises(
        ConfigError, match=r"schedule\.lr_base_batch_size=.*null or a whole number of at least 1"
    ):
        composed(f"schedule.lr_base_batch_size={value}")
