"""Muon for the matrices of hidden layers and AdamW for everything else, as one optimizer of torch.

Owns which parameters are which. The arithmetic is torch's own: torch.optim.Muon and torch.optim.AdamW.
Source of the division: https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from launcher.engine.names import named_modules, named_parameters, plain_name

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
PRODUCTS = (nn.Linear, nn.MultiheadAttention)
# Of those: a subclass may have tables beside them.
MATRICES = {"weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}


def hidden_matrices(model: nn.Module) -> set[str]:
    """The names of the parameters that Muon trains: matrices of nn.Linear and nn.MultiheadAttention.

    Left out is the head: the one that was registered last, unless it is that of an embedding, or in an
    nn.ModuleList, whose entries are hidden layers. A table that a model keeps as an nn.Parameter, such as one
    of positions, is no product's matrix. Kernels of convolutions have more dimensions than torch.optim.Muon
    takes.
    """
    lists = tuple(f"{name}." for name, module in named_modules(model) if isinstance(module, nn.ModuleList))
    matrices: list[tuple[str, nn.Parameter]] = []  # with the name of its module
    of_embeddings: set[nn.Parameter] = set()
    for name, module in model.named_modules(remove_duplicate=False):  # a tied head comes last, too
        if isinstance(module, EMBEDDINGS + PRODUCTS):
            own = [p for part, p in module.named_parameters(recurse=False) if part in MATRICES]
            matrices += [(f"{plain_name(name)}.", p) for p in own]
            of_embeddings.update(own if isinstance(module, EMBEDDINGS) else ())
    last_name, last = matrices[-1] if matrices else ("", None)
    head = None if last_name.startswith(lists) else last
    hidden = {p for _, p in matrices if p is not head} - of_embeddings
    return {name for name, p in named_parameters(model).items() if p in hidden}


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
