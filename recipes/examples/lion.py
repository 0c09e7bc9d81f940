"""An optimizer of one's own: Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2), on the digits.

It updates the fp32 masters. A class of torch.optim needs no body: `class Mine(torch.optim.Adamax): pass`.
The keys of conf/optim/lion.yaml are its options; `optim=lion` chooses that file.

    scripts/run recipe=recipes/examples/lion.py data=digits optim=lion train.epochs=3 \
        --config-dir recipes/examples/conf
"""

import torch
from torch import nn

from launcher.data import load_images
from launcher.recipe import Recipe, cross_entropy, optimizer, recipe


@optimizer("lion")
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (update_beta, average_beta), lr = group["betas"], group["lr"]
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                update = torch.lerp(p.grad, average, update_beta).sign()
                p.mul_(1 - lr * group["weight_decay"]).sub_(update, alpha=lr)
                average.lerp_(p.grad, 1 - average_beta)


@recipe
def digits(config):
    images = load_images(config.data)  # uint8 [n, 1, 8, 8]
    return Recipe(
        build_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        train=images.train,
        validation=images.validation,
        train_transform=images.train_transform(config.data.augment),
        eval_transform=images.eval_transform(),
        loss=cross_entropy,
        classes=images.classes,
    )
