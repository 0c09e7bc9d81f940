"""Residual networks for image classification: ResNet-18, 34, 50, 101 and 152.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015 (arXiv:1512.03385), table 1 and
section 3.3. The bottleneck's stride sits on its 3x3 convolution and the last norm of a block may start
at zero, as in Goyal et al., 2017 (arXiv:1706.02677, section 5.1). Names of the weights are torchvision's.

Accuracy on held-out images, mean and standard deviation over the same seeds in fp32 and in emulated fp16; two
ranks on 2 cores of an AMD EPYC, torch 2.13.0, 2026-11-22:

    digits, 12 epochs, 3 seeds: 99.07 % (0.32) and 99.16 % (0.00)
        scripts/run recipe=resnet18 launch.nproc=2 seed=0 precision=fp16
    397 photographs of ants and bees from scratch, 40 epochs, 5 seeds: 64.50 % (1.43) and 65.25 % (3.79)
        scripts/run recipe=resnet18 data=imagefolder data.path=DIR data.image_size=64 model.stem=imagenet \
            data.crop_scale=0.3 data.batch_size=32 optim.lr=0.03 train.epochs=40 launch.nproc=2 seed=0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from launcher.data import load_images
from launcher.recipe import (
    Classification,
    Config,
    ConfigError,
    Recipe,
    cross_entropy,
    model,
    model_builder,
    recipe,
)

SMALL_IMAGE_PIXELS = 64  # up to this height and width, the ImageNet stem would throw most of the image away


@recipe("resnet")
def resnet(config: Config) -> Recipe:
    images = load_images(config.data)
    return Recipe(
        build_model=model_builder(  # model=resnet18 to resnet152, registered at the end of this file
            config,
            num_classes=len(images.classes),
            in_channels=images.channels,
            image_size=max(images.height, images.width),
        ),
        train=images.train,
        validation=images.validation,
        train_transform=images.train_transform(config.data.augment),  # on the device: crop, mirror, normalise
        eval_transform=images.eval_transform(),  # normalise
        loss=cross_entropy,
        metrics=[Classification(images.classes)],
        monitor="accuracy",
        classes=images.classes,
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return self.relu(residual + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1 to reduce, 3x3, 1x1 to restore four times the width, around a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        return self.relu(residual + self.downsample(x))


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """Stem, four stages of blocks, mean over the pixels, one linear layer.

    images: float [n, in_channels, h, w] -> logits: [n, num_classes]
    """

    def __init__(
        self, block: Block, depths: Sequence[int], num_classes: int, in_channels: int, small_stem: bool
    ) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, 64, 3) if small_stem else conv(in_channels, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = stage(block, depths[0], 64, 64, stride=1)
        self.layer2 = stage(block, depths[1], 64 * block.expansion, 128, stride=2)
        self.layer3 = stage(block, depths[2], 128 * block.expansion, 256, stride=2)
        self.layer4 = stage(block, depths[3], 256 * block.expansion, 512, stride=2)
        self.fc = nn.Linear(512 * block.expansion, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size at stride 1. No bias: a batch norm follows and has its own."""
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The identity where shapes agree, else a projection (option B of the paper)."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


def stage(block: Block, depth: int, in_channels: int, width: int, stride: int) -> nn.Sequential:
    first = block(in_channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(depth - 1)))


def initialise(network: ResNet, zero_init_residual: bool) -> None:
    """He initialisation of the convolutions; norms start as the identity, or at zero at a block's end."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init_residual and isinstance(module, BasicBlock | Bottleneck):
            last_norm = module.bn2 if isinstance(module, BasicBlock) else module.bn3
            nn.init.zeros_(last_norm.weight)


def resnet_of(block: Block, depths: Sequence[int]) -> Callable[..., ResNet]:
    """The function that builds the network with these stages from the facts of the data and the options."""

    def build(
        num_classes: int,
        in_channels: int,
        image_size: int,
        stem: str = "auto",
        zero_init_residual: bool = True,
    ) -> ResNet:
        stems = {"auto": image_size <= SMALL_IMAGE_PIXELS, "imagenet": False, "small": True}
        if not isinstance(stem, str) or stem not in stems:
            raise ConfigError(f"model.stem={stem!r} is not one of {', '.join(stems)}.")
        if not isinstance(zero_init_residual, bool):
            raise ConfigError(f"model.zero_init_residual={zero_init_residual!r} is not true or false.")
        network = ResNet(block, depths, num_classes, in_channels, small_stem=stems[stem])
        initialise(network, zero_init_residual)
        return network

    return build


resnet18 = model("resnet18")(resnet_of(BasicBlock, (2, 2, 2, 2)))
resnet34 = model("resnet34")(resnet_of(BasicBlock, (3, 4, 6, 3)))
resnet50 = model("resnet50")(resnet_of(Bottleneck, (3, 4, 6, 3)))
resnet101 = model("resnet101")(resnet_of(Bottleneck, (3, 4, 23, 3)))
resnet152 = model("resnet152")(resnet_of(Bottleneck, (3, 8, 36, 3)))
