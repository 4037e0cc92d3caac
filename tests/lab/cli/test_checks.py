"""Lists of numbers as commands take them."""

import pytest

from keepset import Budget, KeepsetError
from keepset.lab.cli.checks import parse_budgets, parse_whole


def test_each_number_once() -> None:
    assert parse_whole("3, 5,3,-1", "seeds") == [3, 5, -1]
    assert parse_budgets("512, 0.25,1.0,1") == [Budget(512), Budget(bytes=0.25), Budget(bytes=1.0), Budget(1)]


@pytest.mark.parametrize(
    "budget", ["0", "-3", "0.0", "-0.5", "1.5", "1e999", "nan", "half", "True", "1j", "", "0.5 0.2"]
)
def test_what_is_no_budget(budget: str) -> None:
    with pytest.raises(KeepsetError, match=r"is out of range|is not a number"):
        parse_budgets(f"0.5,{budget}")
    with pytest.raises(KeepsetError, match="is too large a number"):
        parse_budgets("9" * 20)
