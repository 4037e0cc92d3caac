from __future__ import annotations

import pytest

from keepset.bench.tune.space import composed_at_most, compositions, scorers, with_budget
from keepset.core.method import Allocator
from keepset.errors import KeepsetError
from keepset.recipe import Recipe
from keepset.registry import METHODS


def test_catalogue_has_every_scorer_once_and_no_recipe_twice() -> None:
    recipes = scorers()
    assert len(set(map(str, recipes))) == len(recipes)
    names = [name for name, kind in METHODS.items() if not issubclass(kind, Allocator)]
    assert len(names) > 10 and all(Recipe.parse(name) in recipes for name in names)
    assert all(recipe.budget.keep is None for recipe in recipes)
    assert any(recipe.method.name == "pool" for recipe in recipes)


@pytest.mark.parametrize("keep", [0.25, 40, 4096])
def test_one_budget_for_all_but_those_that_take_none(keep: int | float) -> None:
    recipes = scorers()
    fitting, unfit = with_budget(recipes, keep, 3.2)
    assert len(fitting) + len(unfit) == len(recipes)
    budgets = {False: {keep}, True: {{0.25: 0.8, 40: 128, 4096: 13107}[keep]}}
    for in_8_bits, expected in budgets.items():
        some = [recipe for recipe in fitting if (recipe.method.name == "int8") is in_8_bits]
        assert {recipe.budget.keep for recipe in some if recipe.method.traits.needs_budget} == expected
    assert {recipe.method.name for recipe in fitting if recipe.budget.keep is None} == {"gvote"}
    for recipe, why in unfit.items():
        with pytest.raises(KeepsetError) as caught:
            recipe.with_keep(keep)
        assert why == str(caught.value)
    assert bool(unfit) == (keep == 40)


def test_compositions_are_of_the_best_scorers_alone_or_inside_a_recipe() -> None:
    text = (
        "gvote, streaming_llm(keep=0.25), random(keep=0.25), duo_attention(keep=0.25), "
        "pool(second_pass(statistic='rms'), keep=0.25, sinks=4, recent=32), second_pass(keep=0.25), "
        "kvcompose(structured=False, keep=0.25), adakv(chunkkv(h2o), keep=0.25), tova(keep=0.25), snapkv(keep=0.25)"
    )
    found = compositions(Recipe.parse_list(text))
    assert len(set(found)) == len(found) == composed_at_most()
    inner = {recipe.method.scorer for recipe in found if isinstance(recipe.method, Allocator)}
    assert inner == {Recipe.parse(each).method for each in ("second_pass(statistic='rms')", "h2o", "tova")}
    texts = list(map(str, found))
    assert (
        "dynamic(second_pass(statistic='rms'), keep=0.25, sinks=4, recent=32)" in texts
        and "ams(tova, keep=0.25)" in texts
    )
    assert not any(recipe.method.name == "uniform" for recipe in found)
    assert [Recipe.parse(each) for each in texts] == found


def test_scorers_inside_named_compositions_count() -> None:
    named = Recipe.parse("kvcompose(keep=0.25)")
    scorers = {recipe.method.scorer for recipe in compositions([named]) if isinstance(recipe.method, Allocator)}
    assert scorers == {Recipe.parse("second_pass(mean_term=True, chunk=0)").method}


def test_few_recipes_give_few_compositions() -> None:
    assert compositions([]) == compositions(Recipe.parse_list("random(keep=9), gvote")) == []
    assert len(compositions([Recipe.parse("tova(keep=99)")])) == composed_at_most() / 3
    # One whose own sinks alone are more is left out.
    assert "ams(tova, keep=9)" not in map(str, compositions([Recipe.parse("tova(keep=9)")]))


def test_what_has_a_name_of_its_own_is_not_composed_again() -> None:
    """`kvcompose` is `composite(second_pass(mean_term=True, chunk=0))`."""
    found = list(map(str, compositions([Recipe.parse("second_pass(mean_term=True, chunk=0, keep=0.3)")])))
    assert "composite(second_pass(mean_term=True, chunk=0), keep=0.3)" not in found
    assert "pool(second_pass(mean_term=True, chunk=0), keep=0.3)" in found and len(found) == composed_at_most() / 3 - 1
    others = list(map(str, compositions([Recipe.parse("second_pass(mean_term=True, chunk=0, keep=0.3, sinks=4)")])))
    assert "composite(second_pass(mean_term=True, chunk=0), keep=0.3, sinks=4)" in others
