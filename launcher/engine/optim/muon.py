"""Muon for the matrices of hidden layers and AdamW for everything else, as one optimizer of torch.

Owns which parameters are which. The arithmetic is torch's own: torch.optim.Muon and torch.optim.AdamW.
Source of the division: https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from launcher.engine.names import named_parameters, plain_name

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def hidden_matrices(model: nn.Module) -> set[str]:
    """The names of the parameters that Muon trains: those of two dimensions within the network.

    Left out are embeddings, and the head: the matrix that was registered last, unless it is that of an
    embedding, or in an nn.ModuleList, whose entries are hidden layers. Kernels of convolutions have more
    dimensions, which torch.optim.Muon does not take.
    """
    lists = [f"{plain_name(name)}." for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    of_embeddings = {
        p for module in model.modules() if isinstance(module, EMBEDDINGS) for p in module.parameters()
    }
    every_name = model.named_parameters(remove_duplicate=False)  # a tied head comes last, too
    matrices = [(plain_name(name), p) for name, p in every_name if p.ndim == 2]
    last_name, last = matrices[-1] if matrices else ("", None)
    head = None if last_name.startswith(tuple(lists)) else last
    return {
        name
        for name, p in named_parameters(model).items()
        if p.ndim == 2 and p is not head and p not in of_embeddings
    }


class MuonWithAdamW(torch.optim.Optimizer):
    """Updates the groups with `use_muon` by torch.optim.Muon, and the others by torch.optim.AdamW.

    One learning rate and one weight decay serve both: Muon's updates are scaled to the size of AdamW's
    (`adjust_lr_fn="match_rms_adamw"`; Liu et al., 2025, arXiv:2502.16982).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "use_muon": False})
        self._parts: list[torch.optim.Optimizer] = []
        if groups := [group for group in self.param_groups if group["use_muon"]]:
            self._parts.append(
                torch.optim.Muon(groups, lr, weight_decay, momentum, nesterov, adjust_lr_fn="match_rms_adamw")
            )
        if groups := [group for group in self.param_groups if not group["use_muon"]]:
            self._parts.append(torch.optim.AdamW(groups, lr, betas, eps, weight_decay))
        for part in self._parts:
            part.state = self.state
        # The groups that the parts read: whoever sets a rate in one of these sets it there.
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient. Takes no closure."""
        assert closure is None
        for part in self._parts:
            part.step()
