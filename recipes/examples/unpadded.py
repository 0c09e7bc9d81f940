"""Targets without padding, samples drawn by weight, and a term of the loss that fades in with the steps.

A signal has one to three peaks; the network finds their places. `flat` joins the peaks of all samples, with
the row of each. `Drawn` replaces a weighted sampler. An integer buffer counts the training passes of a rank:
it is in the checkpoint, so the term continues after a resume.

    scripts/run recipe=recipes/examples/unpadded.py data.batch_size=32 data.num_workers=0
"""

import torch
from torch import nn

from launcher.recipe import Loss, Recipe, recipe

GRID = torch.linspace(0, 1, 64)


@recipe
def unpadded(config):
    return Recipe(Finder, Drawn(Signals(512, seed=0)), Signals(128, seed=1), peak_loss, collate=flat)


class Signals(torch.utils.data.Dataset):
    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        self.peaks = [torch.rand(1 + n % 3, generator=generator) for n in range(number)]

    def __len__(self):
        return len(self.peaks)

    def __getitem__(self, index):  # float [64], float [peaks]
        peaks = self.peaks[index]
        return torch.exp(-(((GRID - peaks[:, None]) * 20) ** 2)).sum(dim=0), peaks


class Drawn(Signals):
    def __init__(self, data):
        self.data, self.peaks = data, data.peaks
        self.weights = torch.tensor([float(len(peaks)) for peaks in data.peaks])
        self.set_epoch(0)

    def set_epoch(self, epoch):  # other samples in each epoch, the same on all ranks and after a resume
        generator = torch.Generator().manual_seed(epoch)
        self.drawn = torch.multinomial(self.weights, len(self), replacement=True, generator=generator)

    def __getitem__(self, index):
        return self.data[int(self.drawn[index])]


def flat(samples):
    signals, peaks = zip(*samples, strict=True)
    rows = torch.arange(len(samples)).repeat_interleave(torch.tensor([len(each) for each in peaks]))
    return {"signal": torch.stack(signals), "peaks": torch.cat(peaks), "row": rows}


class Finder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, signals):  # float [n, 64] -> places [n, 3]
        if self.training:
            self.passes += 1
        return self.layers(signals)


def peak_loss(network, batch):
    places = network(batch["signal"]).float()
    away = (places[batch["row"]] - batch["peaks"][:, None]).abs().amin(dim=1)  # of each peak
    outside = (places - 0.5).abs().sub(0.5).clamp(min=0).sum()
    share = (network.passes / 50).clamp(max=1)
    return Loss(away.sum() + share * outside, len(away))
