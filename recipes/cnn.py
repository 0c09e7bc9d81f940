"""A small convolutional network for images: two convolutions with pooling, and one dense layer.

What introductions to data-parallel training use, on CIFAR-10. `conf/recipe/cnn.yaml` has the settings,
`conf/recipe/cnn_large_batch.yaml` those for large batches.

Accuracy on the test images of CIFAR-10 after 3 epochs, mean and standard deviation over 3 seeds: 64.76 %
(1.69) in fp32, 64.87 % (1.35) in emulated fp16; two ranks on 2 cores of an AMD EPYC, torch 2.13.0,
2026-11-22:

    scripts/run recipe=cnn data.path=DIR launch.nproc=2 train.channels_last=true precision=fp16 seed=0
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from launcher.data import load_images
from launcher.recipe import (
    Batch,
    Classification,
    Config,
    ConfigError,
    Loss,
    Recipe,
    model,
    model_builder,
    recipe,
)


@recipe("cnn")
def cnn(config: Config) -> Recipe:
    images = load_images(config.data)  # columns image uint8 [n, channels, height, width] and label int64 [n]
    return Recipe(
        build_model=model_builder(  # model=cnn: small_cnn below, with the keys of `model` in the config
            config,
            num_classes=len(images.classes),
            in_channels=images.channels,
            height=images.height,
            width=images.width,
        ),
        train=images.train,
        validation=images.validation,
        train_transform=images.train_transform(config.data.augment),  # on the device: crop, mirror, normalise
        eval_transform=images.eval_transform(),  # normalise
        loss=classification_loss,
        metrics=[Classification(images.classes)],
        monitor="accuracy",
        classes=images.classes,
    )


def classification_loss(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    """The sum over the samples, not their mean: the launcher divides by the number on all ranks."""
    logits = network(batch["image"]).float()  # [n, classes]
    loss_sum = F.cross_entropy(logits, batch["label"], reduction="sum", label_smoothing=label_smoothing)
    return Loss(loss_sum, len(logits), logits.detach())


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
