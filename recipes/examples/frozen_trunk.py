"""A model that starts from the weights of another one and trains its last layer only.

The network of recipe=cnn with a new last layer that tells even from odd digits. Its trunk comes from a
safetensors file, is frozen, and needs no gradient, no bytes on the wire and no optimizer state.

    python -m launcher recipe=cnn data=digits run.dir=outputs/trunk
    python -m launcher export outputs/trunk trunk.safetensors
    python -m launcher recipe=frozen_trunk model.weights=trunk.safetensors \
        recipes.path=recipes/examples/frozen_trunk.py --config-dir recipes/examples/conf
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from launcher.data import load_images
from launcher.recipe import (
    Config,
    ConfigError,
    ParameterGroup,
    Recipe,
    TensorData,
    cross_entropy,
    model,
    model_builder,
    recipe,
    registry_of,
)

NEW = "fc."  # what does not come from the file


@recipe("frozen_trunk")
def frozen_trunk(config: Config) -> Recipe:
    images = load_images(config.data)
    sizes = {"in_channels": images.channels, "height": images.height, "width": images.width}
    return Recipe(
        build_model=model_builder(config, num_classes=2, **sizes),
        train=even_or_odd(images.train),
        validation=even_or_odd(images.validation),
        loss=cross_entropy,
        train_transform=images.train_transform(config.data.augment),
        eval_transform=images.eval_transform(),
        classes=("even", "odd"),
        groups=[ParameterGroup("conv*", frozen=True)],
    )


def even_or_odd(data: TensorData) -> TensorData:
    return TensorData(data.columns | {"label": data.columns["label"] % 2}, data.name)


@model("pretrained_cnn")
def pretrained_cnn(
    num_classes: int, in_channels: int, height: int, width: int, weights: str | None = None
) -> nn.Module:
    network = registry_of(None).models["cnn"](num_classes, in_channels, height, width)
    if weights is None or not Path(weights).is_file():
        raise ConfigError(
            f"model.weights={weights}: there is no such file. Write one: python -m launcher export RUN FILE"
        )
    trunk = {name: value for name, value in load_file(weights).items() if not name.startswith(NEW)}
    wanted = {name: value.shape for name, value in network.state_dict().items() if not name.startswith(NEW)}
    if {name: value.shape for name, value in trunk.items()} != wanted:
        raise ConfigError(f"model.weights={weights}: its tensors are not those of the trunk: {wanted}.")
    network.load_state_dict(trunk, strict=False)
    return network
