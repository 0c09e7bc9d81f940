"""What is done to images on the device: random crops, mirroring and normalisation.

Each takes a batch and the random numbers of its samples, so that the result depends on these alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.data.tensors import Batch

Constants = tuple[float, ...]  # one per channel, for pixels in 0..1


def crop_and_flip(images: Tensor, noise: Tensor, padding: int, flip: bool) -> Tensor:
    """Random crops of images [n, c, h, w] padded with zeros, mirrored for half of them, in one gather.

    noise [n, >= 3] in [0, 1): vertical offset, horizontal offset, mirrored if below 1/2.
    """
    if padding == 0 and not flip:
        return images
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, (padding,) * 4)
    # floor(u * k) < k for every fp32 u < 1: the product rounds down below k
    offsets = (noise[:, :2] * (2 * padding + 1)).long()  # [n, 2]
    rows = offsets[:, :1] + torch.arange(height, device=device)  # [n, h]
    columns = torch.arange(width, device=device).expand(count, width)  # [n, w]
    if flip:
        columns = torch.where(noise[:, 2:3] < 0.5, width - 1 - columns, columns)
    columns = offsets[:, 1:] + columns
    sample = torch.arange(count, device=device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, -1, 1, 1)
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class Normalise:
    """uint8 images [n, c, h, w] -> fp32 with the set's mean 0 and standard deviation 1 per channel."""

    mean: Constants
    std: Constants
    _on_device: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, images: Tensor) -> Tensor:
        scale, shift = self._constants(images.device)
        return images.float().mul_(scale).add_(shift)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # cached: a copy from the host in every step would synchronize with the device
        if device not in self._on_device:
            mean, std = torch.tensor([self.mean, self.std]).view(2, -1, 1, 1).to(device)
            self._on_device[device] = (1 / (255 * std), -mean / std)
        return self._on_device[device]


@dataclass(frozen=True)
class ImageTransform:
    """batch -> the same with normalised fp32 images, cropped and mirrored by noise [n, >= 3] where given."""

    normalise: Normalise
    padding: int = 0
    flip: bool = False

    def __call__(self, batch: Batch, noise: Tensor | None = None) -> Batch:
        images = batch["image"]
        if noise is not None:
            images = crop_and_flip(images, noise, self.padding, self.flip)
        return {**batch, "image": self.normalise(images)}

    @property
    def normalisation(self) -> dict[str, Constants]:
        """What is done to pixels in 0..1, for who predicts with the weights."""
        return {"mean": self.normalise.mean, "std": self.normalise.std}
