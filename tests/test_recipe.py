from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import warnings
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from keepset import METHODS, Budget, KeepsetError, Method, Observation, Recipe, Schedule, register
from keepset.allocators.heads import AdaKV
from keepset.allocators.layers import Pyramid
from keepset.allocators.presets import Preset
from keepset.core.method import Allocator
from keepset.methods.expected_attention import ExpectedAttention
from keepset.methods.keys import Knorm
from keepset.methods.positions import Random, StreamingLLM
from keepset.methods.window import TOVA, SnapKV
from keepset.recipe import in_full, in_short, shown
from tests.tiers import examples


def refusal(text: str) -> str:
    """The one sentence with which a text is refused."""
    with pytest.raises(KeepsetError) as caught:
        Recipe.parse(text)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


# Round trip


def values(kind: type, metadata: Any) -> st.SearchStrategy[Any]:
    """Values of one parameter, in its range."""
    low, high = metadata.get("minimum"), metadata.get("maximum")
    if choices := metadata.get("choices"):
        return st.sampled_from(choices)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(low, high if high is not None else 2**63 - 1)
    if kind is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if kind is str:  # names of files; letters that mean something in a recipe are left out where white space is added
        return st.text(st.characters(exclude_characters="(),=", exclude_categories=("Cs",)), max_size=12)
    raise TypeError(f"no strategy for {kind}")


@st.composite
def methods(draw: st.DrawFn, depth: int = 3) -> Method:
    names = sorted(name for name, kind in METHODS.items() if depth or not issubclass(kind, Allocator))
    kind = METHODS[draw(st.sampled_from(names))]
    hints, chosen = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        if field.name == "scorer":
            chosen["scorer"] = draw(methods(depth - 1))
        elif draw(st.booleans()):
            chosen[field.name] = draw(values(hints[field.name], field.metadata))
    try:
        return kind(**chosen)
    except KeepsetError:  # such as an even kernel, or a pyramid in a pyramid
        return SnapKV()


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    method = draw(methods())
    sinks = draw(st.just(method.traits.sinks) | st.integers(0, 100))
    recent = draw(st.just(method.traits.recent) | st.integers(0, 100))
    fraction = st.floats(0, 1, exclude_min=True)
    number = st.integers(max(1, sinks + recent), 2**63 - 1) if sinks + recent < 2**63 else fraction
    every = draw(st.none() | st.integers(1, 10_000))
    prefill = draw(st.booleans()) if every else True
    keep = draw(st.none() | number if every and sinks + recent < 2**63 else st.none() if every else fraction | number)
    protect_prompt = draw(st.booleans()) if every else False
    protect = draw(st.just([]) | st.lists(st.tuples(st.integers(0, 9), st.integers(10, 2**63 - 1)), max_size=2))
    share = draw(st.none() | fraction) if keep is None and not every else None
    extra = draw(st.booleans()) if share is None else False
    short = draw(st.just(0) | st.integers(1, 2**63 - 1))
    budget = Budget(keep, sinks, recent, protect_prompt, protect, bytes=share, recent_extra=extra, short=short)
    return Recipe(method, budget, Schedule(prefill, every))


@examples(300, derandomize=False)
@given(recipe=recipes())
def test_parsing_its_text_gives_the_recipe_back(recipe: Recipe) -> None:
    again = Recipe.parse(str(recipe))
    assert again == recipe
    assert type(again.budget.keep) is type(recipe.budget.keep)
    assert str(again) == str(recipe)


@examples(100, derandomize=False)
@given(recipe=recipes())
def test_a_text_in_full_names_everything_and_says_the_same(recipe: Recipe) -> None:
    full = in_full(str(recipe))
    assert Recipe.parse(full) == recipe and in_full(full) == full
    assert in_short(full) == shown(full) and Recipe.parse(shown(full)) == recipe
    # Bits that the budget would say anyway are left out.
    assert shown(full) in (str(recipe), re.sub(r"(, )?bits=\d(, )?", lambda m: (m[1] and m[2]) or "", str(recipe)))
    step: Any = recipe.method
    while step is not None:
        assert all(f"{field.name}=" in full for field in dataclasses.fields(step) if field.name != "scorer")
        step = getattr(step, "scorer", None)
    for name, value in {**vars(recipe.budget), **vars(recipe.schedule)}.items():
        if name in ("recent_extra", "turns"):  # older files do not name them
            assert (f"{name}=True" in full) is value and f"{name}=False" not in full
        elif name == "short":
            assert (f"short={value}" in full) is bool(value) and "short=0" not in full
        elif name != "protect":
            assert (f"{name}={value!r}" in full) is (value is not None)


def test_a_text_in_full_is_of_any_budget() -> None:
    text = "snapkv(keep=0.5, every=32)"
    assert "go with every=32" in refusal(text)
    whole = "snapkv(window=64, kernel=5, keep=0.5, sinks=0, recent=64, protect_prompt=False, prefill=True, every=32)"
    assert in_full(text) == whole and in_short(whole) == text


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("snapkv(window=64, keep=9, sinks=0, recent=4, protect_prompt=False, prefill=True)", "kernel"),
        ("adakv(tova, floor=0.2, safeguard='mix', sinks=0, recent=4, protect_prompt=False)", "prefill"),
        ("adakv(snapkv(window=64, kernel=5), sinks=0, recent=4, protect_prompt=False, prefill=True)", "floor"),
        ("adakv(scorer=snapkv, floor=0.2, sinks=0, recent=4, protect_prompt=False, prefill=True)", "kernel"),
        ("tova(keep=9)", "prefill"),
    ],
)
def test_a_text_that_leaves_something_out_is_not_in_full(text: str, missing: str) -> None:
    with pytest.raises(KeepsetError, match=rf"does not say {missing}, whose default may have been another\.$"):
        in_short(text)
    assert shown(text) == text


def test_presets_are_what_files_know_under_their_names() -> None:
    """Files name a preset, not what it is made of: one that comes to be made otherwise takes another name."""
    presets = [kind() for kind in METHODS.values() if issubclass(kind, Preset)]
    compositions = {preset.name: in_full(str(Recipe.of(preset.composition))) for preset in presets}
    always = "protect_prompt=False, prefill=True"
    pooled = f"floor=0.2, groups=0, sinks=4, recent=8, {always}"
    assert compositions == {
        "kvcompose": "composite(second_pass(task='context', statistic='max', aggregate_group='mean', mean_term=True, "
        f"values='none', chunk=0), aggregate_head='mean', floor=0.0, sinks=0, recent=0, {always})",
        "kvzip": "pool(second_pass(task='repeat', statistic='max', aggregate_group='max', mean_term=False, "
        f"values='none', chunk=2048), floor=0.0, groups=0, sinks=0, recent=0, {always})",
        "glance": f"pool(prompt_queries(stride=4, second_pass=False), {pooled})",
        "reread": f"pool(prompt_queries(stride=1, second_pass=True), {pooled})",
    }


@examples(100, derandomize=False)
@given(recipe=recipes(), spaces=st.lists(st.text(" \t\n", max_size=2), min_size=3, max_size=7))
def test_white_space_means_nothing(recipe: Recipe, spaces: list[str]) -> None:
    space = itertools.cycle(spaces)
    head, bracket, inside = str(recipe).partition("(")
    # A line may end inside the brackets, as everywhere in Python.
    text = next(space) + head + next(space).replace("\n", "") + bracket
    for letter in inside:
        text += next(space) + letter + next(space) if letter in "(),=" else letter
    assert Recipe.parse(text) == recipe


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("knorm()", Recipe(Knorm())),
        ("tova(keep=7, every=4)", Recipe(TOVA(), Budget(7, recent=1), Schedule(every=4))),
        ("streaming_llm(keep=64, sinks=2)", Recipe(StreamingLLM(), Budget(64, sinks=2))),
        (
            "random(keep=9, every=4, protect_prompt=True)",
            Recipe(Random(), Budget(9, protect_prompt=True), Schedule(prefill=False, every=4)),
        ),
        ("knorm(keep=9, protect=[[4, 7], [0, 2]])", Recipe(Knorm(), Budget(9, protect=((0, 2), (4, 7))))),
        ("snapkv(window=8, recent=0)", Recipe(SnapKV(window=8), Budget())),
        (
            "expected_attention(skip=2, covariance=False)",
            Recipe(ExpectedAttention(skip=2, covariance=False), Budget(sinks=2)),
        ),
        ("adakv(snapkv, floor=1)", Recipe(AdaKV(SnapKV(), floor=1.0), Budget(recent=64))),
        ("adakv(scorer=snapkv(window=2))", Recipe(AdaKV(SnapKV(window=2)), Budget(recent=2))),
        ("adakv(pyramid(knorm, beta=3), keep=9)", Recipe(AdaKV(Pyramid(Knorm(), beta=3)), Budget(9))),
        ("knorm(keep=512, prefill=False, every=128)", Recipe(Knorm(), Budget(512), Schedule(prefill=False, every=128))),
    ],
)
def test_texts(text: str, recipe: Recipe) -> None:
    assert Recipe.parse(text) == recipe


def test_canonical_text() -> None:
    for text, canonical in {
        "knorm()": "knorm",
        " snapkv( window = 64,keep=.5 ) ": "snapkv(keep=0.5)",
        "adakv(snapkv(), floor=0.20)": "adakv(snapkv)",
        "adakv(scorer=snapkv(kernel=7), keep=1_000)": "adakv(snapkv(kernel=7), keep=1000)",
        "streaming_llm(recent=0, sinks=4)": "streaming_llm",
        "tova(every=4, prefill=True, keep=8)": "tova(keep=8, every=4)",
    }.items():
        assert str(Recipe.parse(text)) == canonical


def test_text_with_another_keep_need_not_suit_the_recipe() -> None:
    recipe = Recipe.parse("streaming_llm(keep=64, every=8)")
    assert recipe.text(3) == "streaming_llm(keep=3, every=8)" and recipe.text(None) == "streaming_llm(every=8)"


# Refusals


def test_names_the_nearest() -> None:
    methods = {"snapvk(keep=0.5)": "snapkv", "SnapKV": "snapkv", "adakv(streamingllm)": "streaming_llm"}
    parameters = {"snapkv(windw=3)": "window", "snapkv(kep=0.5)": "keep", "tova(ever=4)": "every"}
    for text, near in (methods | parameters | {"adakv(snapkv, flor=0.5)": "floor"}).items():
        assert f"did you mean {near!r}?" in refusal(text)


def test_lists_what_there_is_when_nothing_is_near() -> None:
    message = refusal("zzzzzzzz")
    assert "did you mean" not in message
    assert all(name in message for name in METHODS)


@pytest.mark.parametrize(
    ("says", "texts"),
    [
        (
            "is not a recipe",
            [
                *("", "   ", "snapkv(", "0.5", "'snapkv'", "None", "knorm; knorm", "knorm = 3", "knorm\x00", "\ud800"),
                *("[knorm]", "knorm()()", "knorm.score(keep=0.5)", "knorm(**{'keep': 0.5})", "adakv(*[knorm])"),
                *("adakv(3)", "adakv(scorer='knorm')", "adakv(None)"),
            ],
        ),
        ("takes only named parameters", ["knorm(0.5)"]),
        ("takes one method", ["adakv(knorm, tova)", "adakv(knorm, 0.5)"]),
        ("write for example adakv(snapkv, keep=0.25)", ["adakv"]),
        ("write for example pyramid(snapkv, keep=0.25)", ["pyramid(keep=0.25)"]),
        ("no parameter 'keep' inside another method", ["adakv(knorm(keep=0.5))"]),
        ("no parameter 'every' inside another method", ["adakv(knorm(every=5))"]),
        ("no parameter 'bytes' inside another method", ["int8(knorm(bytes=0.5))"]),
        ("give it once", ["adakv(knorm, scorer=tova)"]),
        ("keep is given twice", ["knorm(keep=0.5, keep=0.6)"]),
        ("window is given twice", ["snapkv(window=3, window=4)"]),
        ("use it once", ["pyramid(pyramid(knorm))"]),
        # What only a budget refuses is in core/test_budget.py.
        ("keep=0.0", ["knorm(keep=1e-999)"]),
        ("keep=-1", ["knorm(keep=-1)"]),
        ("leave keep out", ["knorm(keep=None)"]),
        ("leave bytes out", ["knorm(bytes=None)"]),
        ("bytes=25 is out of range", ["knorm(bytes=25)"]),
        ("keep=0.5 and bytes=0.5 both say how much stays", ["knorm(bytes=0.5, keep=0.5)"]),
        ("bytes=0.5 does not go with every=8", ["knorm(bytes=0.5, every=8)"]),
        ("leave every out", ["knorm(every=None)"]),
        ("every=0", ["knorm(every=0)"]),
        ("prefill=1", ["knorm(prefill=1)"]),
        ("every", ["knorm(prefill=False)"]),
        ("use a whole number of entries", ["knorm(keep=0.5, every=8)"]),
        ("keep=1.0 does not go with every=8", ["knorm(keep=1.0, prefill=False, every=8)"]),
        ("sinks=1.0", ["knorm(sinks=1.0)"]),
        ("recent=False", ["knorm(recent=False)"]),
        ("1 or more", ["snapkv(window=0)", "snapkv(window=-3)"]),
        ("whole number", [f"snapkv(window={value})" for value in ("2.0", "True", "None", "'8'")]),
        ("odd", ["snapkv(kernel=4)"]),
        ("0.0 to 1.0", ["adakv(snapkv, floor=1.01)", "adakv(snapkv, floor=-0.1)"]),
        ("a number", ["adakv(snapkv, floor=True)", "adakv(snapkv, floor='a')"]),
        ("True or False", ["expected_attention(covariance=1)", "expected_attention(covariance=None)"]),
        ("0 to 2147483647", ["random(seed=-1)"]),
        ("below the 64 entries that always stay", ["snapkv(keep=63)"]),
        ("below the 4 entries that always stay", ["streaming_llm(keep=3)"]),
    ],
)
def test_refuses_what_is_no_recipe_and_values_out_of_range(says: str, texts: list[str]) -> None:
    for text in texts:
        assert says in refusal(text), text


@pytest.mark.parametrize("name", ["knorm(keep", "adakv(knorm, floor", "expected_attention(epsilon", "snapkv(window"])
def test_refuses_numbers_too_large_to_use(name: str) -> None:
    for value in ("1e999", "-1e999", "9" * 400, "1" + "0" * 30, "0x" + "f" * 5000, "-0x" + "f" * 5000, "9" * 5000):
        assert "too large" in (message := refusal(f"{name}={value})")) or "is not a recipe" in message


NO_VALUES = re.split(
    r"\n|   +",
    """__import__('os').system('true')   ().__class__.__bases__   print(1)   len   nan   inf   float('nan')   [1]
(1, 2)   {1: 2}   {1}   [x for x in (1, 2)]   (x for x in (1, 2))   {x: x for x in (1, 2)}   lambda: 1   (lambda: 1)()
f'{1}'   f'{__import__}'   b'1'   1j   ...   1 + 1   2 ** 99999999   3 - 1   +1   --1   ~1   not True   -True   -'a'
snapkv   1 if True else 2   1 < 2   True and 1   (y := 1)   'a'[0]""",
)


@pytest.mark.parametrize(("index", "value"), enumerate([*NO_VALUES, f"0.{'1' * 2000} + 1"]))
def test_nothing_is_evaluated(index: int, value: str) -> None:
    name = ("knorm(keep", "snapkv(window", "expected_attention(epsilon", "knorm(prefill")[index % 4]
    assert "is not a plain value" in refusal(f"{name}={value})")
    assert "is not a plain value" in refusal(f"knorm(keep={value})")


def test_a_text_is_searched_for_a_value_only_to_name_it_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search reads the whole text: one for every number made parsing quadratic."""
    search, searched = ast.get_source_segment, []

    def counted(text: str, node: ast.AST) -> str | None:
        searched.append(node)
        return search(text, node)

    monkeypatch.setattr(ast, "get_source_segment", counted)
    ranges = [[2 * i, 2 * i + 1] for i in range(2_000)]
    assert Recipe.parse(f"tova(keep=9, protect={ranges})").budget.protect == tuple(map(tuple, ranges))
    assert not searched
    assert "protect=1 + 1 is not a plain value" in refusal(f"tova(keep=9, protect={str(ranges)[:-1]}, [1, 1 + 1]])")
    assert len(searched) == 1


@pytest.mark.parametrize("text", ["'image'", "'text'", "['image', [0, 4]]", "['image', 'text']"])
def test_kinds_of_tokens_are_protected_by_name(text: str) -> None:
    recipe = Recipe.parse(f"tova(keep=9, protect={text})")
    assert str(recipe) == f"tova(keep=9, protect={text})" == in_short(in_full(str(recipe)))


def test_no_other_expression_is_a_method() -> None:
    for text in (
        *("__import__('os').system('true')", "__import__", "exec", "snapkv.__class__", "(lambda: snapkv)()"),
        *("[snapkv for _ in (1,)]", "f'{snapkv}'", "adakv(__import__('os'))", "adakv(snapkv if True else tova)"),
        *("adakv([snapkv][0])", "await snapkv", "yield snapkv"),
    ):
        refusal(text)


def test_huge_texts_are_refused_like_others() -> None:
    nested = ("(" * 1000 + "knorm" + ")" * 1000, "adakv(" * 1000 + "knorm" + ")" * 1000, "knorm(" * 1000 + ")" * 1000)
    signs = ("-" * 100_000 + "1", "knorm(keep=" + "-" * 900 + "1)", "knorm(keep=1" + "+1" * 3000 + ")")
    values = ("knorm(keep=a" + ".b" * 3000 + ")", "snapkv(window=" + "[" * 150 + "]" * 150 + ")", "[" * 100_000)
    chains = ("knorm" + "()" * 3000, "knorm" + ".a" * 3000, "knorm(" + "keep=1," * 5000 + ")")
    words = ("x" * 1_000_000, "'" + "x" * 1_000_000 + "'", "knorm(keep='" + "x" * 1_000_000 + "')")
    for text in (*nested, *signs, *values, *chains, *words):
        refusal(text)


def test_depth_that_parses_also_prints() -> None:
    text = "uniform(" * 40 + "knorm" + ")" * 40
    assert str(Recipe.parse(text)) == text


WORDS = [
    *METHODS,
    *("keep", "sinks", "recent", "every", "prefill", "window", "kernel", "scorer", "floor", "epsilon", "seed"),
    *("(", ")", ")", ",", "=", "=", " ", "\n", "[", "]", "{", "}", ".", ":", ":=", "*", "**", "-", "+", "~", "#"),
    *("0.5", "7", "1e999", "0", "-1", "0x", "1_", "True", "None", "...", "inf", "3j", "'a'", '"', "'", "\\", "f'{"),
    *("b'", "lambda", "for", "in", "if", "else", "not", "await", "yield", "import", "__import__"),
    *("@", ";", "\x00", "é"),
]


def check_text(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            recipe = Recipe.parse(text)
        except KeepsetError as error:
            message = str(error)
            assert message.endswith(".") and "\n" not in message
        else:
            assert Recipe.parse(str(recipe)) == recipe


@examples(1000, derandomize=False)
@given(text=st.lists(st.sampled_from(WORDS), max_size=16).map("".join) | st.text(max_size=30))
@example(text="snapkv(\\")
@example(text="knorm(keep=0_)")
def test_any_text_is_a_recipe_or_refused(text: str) -> None:
    check_text(text)


@examples(300, derandomize=False)
@given(recipe=recipes(), data=st.data())
def test_a_damaged_recipe_is_a_recipe_or_refused(recipe: Recipe, data: st.DataObject) -> None:
    text = str(recipe)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 4)))
    check_text(text[:start] + data.draw(st.sampled_from(WORDS)) + text[stop:])


# What is around the text


def test_select_needs_a_budget() -> None:
    observation = Observation(keys=torch.ones(1, 1, 8, 2), values=torch.ones(1, 1, 8, 2))
    assert Recipe.parse("knorm(keep=0.5)").select(observation).counts.tolist() == [[[4]]]
    message = r"knorm does not say how much to keep: write knorm\(bytes=0.25\), .* or knorm\(keep=512\)"
    with pytest.raises(KeepsetError, match=message):
        Recipe.parse("knorm").select(observation)
    with pytest.raises(KeepsetError, match=r"does not say how much to keep: write snapkv\(keep=512, every=8\)\.$"):
        Recipe.parse("snapkv(every=8)").select(observation)


def test_what_follows_from_a_recipe_is_checked_too() -> None:
    recipe = Recipe.parse("knorm(every=8, keep=1)")
    assert str(recipe.with_budget()) == "knorm(every=8)"
    assert str(recipe.with_budget(keep=7)) == "knorm(keep=7, every=8)"
    share = Recipe.parse("knorm(bytes=0.5, sinks=3)")
    assert str(share.with_budget()) == "knorm(sinks=3)" and str(share.with_budget(keep=7)) == "knorm(keep=7, sinks=3)"
    whole = Recipe.parse("knorm(sinks=3)").with_budget(keep=3)
    assert share.with_budget(bytes=0.5) == share == whole.with_budget(bytes=0.5)
    with pytest.raises(KeepsetError, match="a share of what is left"):
        recipe.with_budget(keep=0.5)
    with pytest.raises(KeepsetError, match="a share of what is left"):
        Recipe.of(Knorm(), keep=0.5, every=8)


@pytest.mark.parametrize(
    "options",
    [dict(prefill=1), dict(prefill=None), *(dict(every=bad) for bad in (0, -5, 1.5, True)), dict(prefill=False)],
    ids=str,
)
def test_schedules_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(KeepsetError) as caught:
        Schedule(**options)
    ((name, value),) = options.items()
    says = f"{name}={value}" if value is not False else "every=..."
    assert says in str(caught.value) and str(caught.value).endswith(".")


def test_a_name_is_registered_once() -> None:
    again = dataclasses.make_dataclass("Again", [], bases=(Knorm,), namespace={"name": "snapkv"}, frozen=True)
    with pytest.raises(KeepsetError, match="choose another name"):
        register(again)
    assert METHODS["snapkv"] is SnapKV
    assert register(SnapKV) is SnapKV
