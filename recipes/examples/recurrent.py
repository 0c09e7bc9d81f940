"""Truncated backpropagation through time, and a weight for each sample.

The state is carried from segment to segment of a sample without its gradients, within one update. The loss
counts weights instead of samples, so its mean is the weighted one.

    scripts/run recipe=recipes/examples/recurrent.py optim=adamw optim.lr=3e-3 data.batch_size=32 \
        train.epochs=4
"""

import torch
from torch import nn

from launcher.recipe import Loss, Recipe, TensorData, recipe


@recipe
def recurrent(config):
    return Recipe(Summing, walks(512), walks(128), segments_loss)


def walks(number):  # drawn with the seed of the run
    steps = torch.randn(number, 32, 2)
    return TensorData({"steps": steps, "sums": steps.sum(2).cumsum(1) / 8, "weight": torch.rand(number)})


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, steps, state=None):  # float [n, time, 2] -> [n, time], state
        outputs, state = self.rnn(steps, state)
        return self.head(outputs)[..., 0], state


def segments_loss(network, batch):
    total, state, weight = 0.0, None, batch["weight"][:, None]
    for steps, sums in zip(batch["steps"].split(8, dim=1), batch["sums"].split(8, dim=1), strict=True):
        found, state = network(steps, state)
        state = state.detach()
        total = total + (weight * (found.float() - sums) ** 2).sum()
    return Loss(total, weight.sum() * batch["sums"].shape[1])
