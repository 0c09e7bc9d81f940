"""A small convolutional network for images: two convolutions with pooling, and one dense layer.

What introductions to data-parallel training use, on CIFAR-10. `conf/recipe/cnn.yaml` has the settings,
`conf/recipe/cnn_large_batch.yaml` those for large batches.
"""

from __future__ import annotations

from torch import Tensor, nn

from launcher.data import load_images
from launcher.recipe import Config, ConfigError, Recipe, image_recipe, model, model_builder, recipe


@recipe("cnn")
def cnn(config: Config) -> Recipe:
    images = load_images(config.data)
    build_model = model_builder(
        config,
        num_classes=len(images.classes),
        in_channels=images.channels,
        height=images.height,
        width=images.width,
    )
    return image_recipe(config, images, build_model)


class SmallCnn(nn.Module):
    """Two times convolution, ReLU, 2x2 max pooling; then one linear layer.

    images: float [n, in_channels, height, width] -> logits: [n, num_classes]
    """

    def __init__(self, num_classes: int, in_channels: int, height: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(64, 128, kernel_size=3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.fc = nn.Linear(128 * (height // 4) * (width // 4), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv1(images)))
        x = self.pool(self.relu(self.conv2(x)))
        return self.fc(x.flatten(start_dim=1))


@model("cnn")
def small_cnn(num_classes: int, in_channels: int, height: int, width: int) -> SmallCnn:
    if min(height, width) < 4:
        raise ConfigError(
            f"the images have {height} x {width} pixels, and model=cnn halves each side twice: it needs at "
            "least 4 x 4. Resize the images, or choose another model."
        )
    return SmallCnn(num_classes, in_channels, height, width)
