"""What a sweep compares: recipes under budgets, each once."""

from keepset import Budget, Recipe
from keepset.lab.candidate import candidates, grid
from keepset.lab.record import FULL, largest_first

RECIPES = Recipe.parse_list("snapkv, adakv(snapkv(window=8)), knorm(keep=0.3), gvote")


def test_the_full_cache_comes_first_then_every_recipe_under_every_budget_once() -> None:
    found = candidates(RECIPES, [Budget(bytes=0.5), Budget(64)])
    assert [(one.text, one.method, one.requested) for one in found] == [
        (FULL, FULL, None),
        ("snapkv(bytes=0.5)", "snapkv", "bytes=0.5"),
        ("snapkv(keep=64)", "snapkv", "keep=64"),
        ("adakv(snapkv(window=8), bytes=0.5)", "adakv(snapkv(window=8))", "bytes=0.5"),
        ("adakv(snapkv(window=8), keep=64)", "adakv(snapkv(window=8))", "keep=64"),
        ("knorm(keep=0.3)", "knorm", "keep=0.3"),
        ("gvote", "gvote", None),
    ]
    assert all(one.error is None for one in found)
    assert found[0].recipe is None
    assert grid(RECIPES, [Budget(bytes=0.5), Budget(64)]) == found[1:]
    assert all(one.recipe == Recipe.parse(one.text) for one in found[1:])
    twice = candidates(Recipe.parse_list("snapkv, snapkv(keep=0.5), snapkv(window=64)"), [Budget(0.5), Budget(0.5)])
    assert [one.text for one in twice] == [FULL, "snapkv(keep=0.5)"]
    assert len(candidates([], [Budget(0.5)])) == 1
    [_, found] = candidates(RECIPES[:1], [])
    assert found.text == "snapkv" and "does not say how much to keep" in (found.error or "")
    # Shares from the largest, then entries from the largest, then what the method decides.
    budgets = ["keep=9", None, "bytes=0.25", "keep=512", "keep=0.5", "bytes=1.0", "bytes=1e-05"]
    ordered = ["bytes=1.0", "keep=0.5", "bytes=0.25", "bytes=1e-05", "keep=512", "keep=9", None]
    assert sorted(budgets, key=largest_first) == ordered


def test_recipes_that_say_not_when_compress_again_while_decoding() -> None:
    recipes = Recipe.parse_list("snapkv, tova(every=16), knorm(keep=40), random(protect_prompt=True, every=32)")
    found = candidates(recipes, [Budget(48)], every=24)[1:]
    assert [one.text for one in found] == [
        "snapkv(keep=48, every=24)",
        "tova(keep=48, every=16)",
        "knorm(keep=40, every=24)",
        "random(keep=48, protect_prompt=True, every=32)",
    ]
    assert found[0].method == "snapkv(every=24)"


def test_first_and_newest_tokens_stay_under_recipes_that_name_no_other_number() -> None:
    recipes = Recipe.parse_list(
        "tova, snapkv, streaming_llm(sinks=2), gvote, random(recent=8, keep=50), knorm(protect_prompt=True, every=8)"
    )
    found = grid(recipes, [Budget(48)], always=(4, 32))
    assert [one.text for one in found] == [
        "tova(keep=48, sinks=4, recent=32)",
        "snapkv(keep=48, sinks=4)",
        "streaming_llm(keep=48, sinks=2, recent=32)",
        "gvote(sinks=4, recent=32)",
        "random(keep=50, sinks=4, recent=8)",
        "knorm(keep=48, sinks=4, recent=32, protect_prompt=True, every=8)",
    ]
    assert found[0].method == "tova(sinks=4, recent=32)"
    assert [one.text for one in found if one.error] == ["snapkv(keep=48, sinks=4)"]
    assert "below the 68 entries that always stay (sinks=4, recent=64)" in (found[1].error or "")


def test_what_does_not_go_together_is_a_candidate_with_the_reason() -> None:
    recipes = Recipe.parse_list("snapkv, h2o, knorm(keep=0.3)")
    found = {one.text: one for one in candidates(recipes, [Budget(bytes=0.5), Budget(8), Budget(128)], every=32)}
    sentences = {
        "snapkv(bytes=0.5, every=32)": "use a whole number of entries",
        "snapkv(keep=8, every=32)": "is below the 64 entries that always stay",
        "h2o(keep=128, every=32)": "leave every= out",
        "knorm(keep=0.3, every=32)": "use a whole number of entries",
    }
    for text, sentence in sentences.items():
        assert sentence in (found[text].error or ""), text
        assert found[text].recipe is None
    assert found["snapkv(keep=128, every=32)"].error is None
    assert found["knorm(keep=0.3, every=32)"].requested == "keep=0.3"
    assert found["snapkv(keep=8, every=32)"].method == "snapkv(every=32)"
