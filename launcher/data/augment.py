"""What is done to images on the device: random crops, mirroring and normalisation.

Random numbers come from torch's generator of the device, which is seeded before each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.data.tensors import Batch

Constants = tuple[float, ...]  # one per channel, for pixels in 0..1


def crop_and_flip(images: Tensor, padding: int, flip: bool) -> Tensor:
    """Random crops of images [n, c, h, w] padded with zeros, mirrored for half of them, in one gather."""
    if padding == 0 and not flip:
        return images
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, (padding,) * 4)
    offsets = torch.randint(2 * padding + 1, (count, 2), device=device)  # vertical, horizontal
    rows = offsets[:, :1] + torch.arange(height, device=device)  # [n, h]
    columns = torch.arange(width, device=device).expand(count, width)  # [n, w]
    if flip:
        mirrored = torch.rand(count, 1, device=device) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
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
    """batch -> the same with normalised fp32 images, which are cropped and mirrored at random."""

    normalise: Normalise
    padding: int = 0
    flip: bool = False

    def __call__(self, batch: Batch) -> Batch:
        images = crop_and_flip(batch["image"], self.padding, self.flip)
        return {**batch, "image": self.normalise(images)}

    @property
    def normalisation(self) -> dict[str, Constants]:
        """What is done to pixels in 0..1, for who predicts with the weights."""
        return {"mean": self.normalise.mean, "std": self.normalise.std}
