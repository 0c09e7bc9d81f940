"""A model that starts from the weights of another one and trains its last layer only.

The network of recipe=cnn with a new last layer that tells even from odd digits. Its trunk comes from a
safetensors file, is frozen, and needs no gradient, no bytes on the wire and no optimizer state. The file's
last layer has another shape, which model.init_from_strict=false allows.

    scripts/run recipe=cnn data=digits run.dir=outputs/trunk
    scripts/run export outputs/trunk trunk.safetensors
    scripts/run recipe=recipes/examples/frozen_trunk.py model=cnn data=digits \
        model.init_from=trunk.safetensors model.init_from_strict=false optim=adamw optim.lr=3e-3 \
        train.epochs=3
"""

from __future__ import annotations

from launcher.data import load_images
from launcher.recipe import (
    Config,
    ConfigError,
    ParameterGroup,
    Recipe,
    TensorData,
    cross_entropy,
    model_builder,
    recipe,
)


@recipe
def frozen_trunk(config: Config) -> Recipe:
    if config.model.init_from is None:
        raise ConfigError(
            "frozen_trunk.py trains the last layer only: give the others with model.init_from=FILE, of the "
            "command export RUN FILE"
        )
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
