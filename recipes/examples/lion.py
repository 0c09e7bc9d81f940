"""An optimizer of one's own: Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2), on the digits.

It updates the fp32 masters. A class of torch.optim needs no body: `class Mine(torch.optim.Adamax): pass`.
The keys of conf/optim/lion.yaml are its options.

    scripts/run recipe=lion recipes.path=recipes/examples/lion.py --config-dir recipes/examples/conf
"""

import torch

from launcher.recipe import optimizer


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
