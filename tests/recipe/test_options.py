import pytest

from launcher.errors import ConfigError
from launcher.recipe import require_counts, require_dropout, require_heads


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_count_is_a_whole_number_of_at_least_1(value):
    require_counts(layers=1, heads=10**9)
    with pytest.raises(ConfigError, match=r"model\.heads=.* must be a whole number of at least 1"):
        require_counts(layers=1, heads=value)


def test_the_width_divides_by_the_heads():
    require_heads(6, 3)
    with pytest.raises(ConfigError, match=r"model\.width=7 does not divide by model\.heads=3"):
        require_heads(7, 3)
    with pytest.raises(ConfigError, match=r"model\.heads=0 must be a whole number"):
        require_heads(7, 0)


@pytest.mark.parametrize("value", [1, -0.1, True, float("nan"), "0.1", None])
def test_dropout_is_below_1(value):
    require_dropout(0)
    require_dropout(0.5)
    with pytest.raises(ConfigError, match=r"model\.dropout=.* must be a number from 0 to below 1"):
        require_dropout(value)
