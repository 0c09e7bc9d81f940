"""Regression and classification on the rows of a table: numbers and categories through a perceptron.

Numbers are standardised, categories become learned vectors (Guo and Berkhahn: Entity Embeddings of
Categorical Variables, 2016, arXiv:1604.06737). A regression learns the standardised target and is
measured in its unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.data import TabularSet, load_table
from launcher.recipe import (
    Batch,
    Config,
    Loss,
    Recipe,
    Regression,
    class_loss,
    model,
    model_builder,
    recipe,
    require_counts,
    require_dropout,
)


@recipe("tabular")
def tabular(config: Config) -> Recipe:
    table = load_table(config.data)
    classes = table.classes
    return Recipe(
        build_model=model_builder(
            config,
            num_numeric=len(table.features.numeric),
            categories=[column.size for column in table.features.categorical],
            num_outputs=1 if classes is None else len(classes),
        ),
        train=table.train,
        validation=table.validation,
        loss=SquaredError(table) if classes is None else table_loss,
        classes=classes,
        metrics=[Regression("target")] if classes is None else None,
        compare_by="rmse" if classes is None else None,
    )


def outputs_of(network: nn.Module, batch: Batch) -> Tensor:
    """fp32 [n, outputs]."""
    return network(batch.get("numeric"), batch.get("categorical")).float()


def table_loss(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    logits = outputs_of(network, batch)
    return Loss(class_loss(logits, batch["label"], label_smoothing), len(logits), logits.detach())


class SquaredError:
    """The squared error of the standardised target; outputs are predictions in the target's unit."""

    def __init__(self, table: TabularSet) -> None:
        self.mean, self.std = table.target_mean, table.target_std

    def __call__(self, network: nn.Module, batch: Batch) -> Loss:
        predicted = outputs_of(network, batch)[:, 0]
        target = batch["target"]
        wanted = ((target - self.mean) / self.std).float()
        loss_sum = F.mse_loss(predicted, wanted, reduction="sum")
        return Loss(loss_sum, len(predicted), predicted.detach().to(target.dtype) * self.std + self.mean)


class TabularNet(nn.Module):
    """numeric: float [n, numbers] or None, categorical: int64 [n, categories] or None -> [n, outputs]"""

    def __init__(
        self,
        num_numeric: int,
        categories: Sequence[int],
        num_outputs: int,
        width: int,
        depth: int,
        dropout: float,
    ) -> None:
        super().__init__()
        sizes = [min(50, (size + 1) // 2) for size in categories]
        self.embeddings = nn.ModuleList(
            nn.Embedding(n, size) for n, size in zip(categories, sizes, strict=True)
        )
        layers: list[nn.Module] = []
        inputs = num_numeric + sum(sizes)
        for _ in range(depth):
            layers += [nn.Linear(inputs, width), nn.ReLU(inplace=True), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, num_outputs))

    def forward(self, numeric: Tensor | None, categorical: Tensor | None) -> Tensor:
        parts = [] if numeric is None else [numeric]
        if categorical is not None:
            parts += [each(codes) for each, codes in zip(self.embeddings, categorical.unbind(1), strict=True)]
        return self.layers(torch.cat([part.to(self.layers[0].weight.dtype) for part in parts], dim=1))


@model("tabular")
def tabular_net(
    num_numeric: int,
    categories: Sequence[int],
    num_outputs: int,
    width: int = 64,
    depth: int = 2,
    dropout: float = 0.0,
) -> TabularNet:
    require_counts(width=width, depth=depth)
    require_dropout(dropout)
    return TabularNet(num_numeric, categories, num_outputs, width, depth, dropout)
