"""The perplexity of a language model, from the loss alone."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Perplexity:
    """`perplexity`: exp of the mean loss over all tokens of the set.

    Exact where the recipe's loss is the sum of the cross-entropies in nats and its count the number of tokens
    that carry loss (Jelinek et al., 1977). inf where the mean is beyond what exp can hold.
    """

    names = ("perplexity",)
    higher_is_better = False

    def of_loss(self, loss_sum: float, count: float) -> Mapping[str, float]:
        """exp of the mean loss of a token."""
        try:
            return {"perplexity": math.exp(loss_sum / count)}
        except OverflowError:
            return {"perplexity": math.inf}
