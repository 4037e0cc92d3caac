"""RULER: its answers looked for in its prompts, its lengths counted, its scores beside the harness's; its files."""

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepset import KeepsetError
from keepset.lab import texts
from keepset.lab.tasks import ruler, ruler_prompts
from keepset.lab.tasks.data import seeded
from keepset.lab.tasks.find import find
from keepset.lab.tasks.ruler_prompts import FrequentWords
from keepset.lab.tasks.task import Example, Question, Task, TaskSettings
from tests.lab.tasks.scaffold import WITH_HARNESS, examples_of, make_task, prompt_of, write_items

pytestmark = WITH_HARNESS

NEEDLES = [name for name in ruler.NAMES if name.startswith("niah")]
MADE = [*NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe"]
DOCUMENTS = ["ruler_qa_squad", "ruler_qa_hotpot"]

HAY = ("niah_multikey_2", "niah_multikey_3")
"""Tasks in which all is needles."""
SHORTEST = {"ruler_vt": 700, "ruler_cwe": 1000}
"""Where an example is shown first, less room is left."""


def task(name: str, length: int, data: Path | None = None) -> Task:
    return make_task(name, data, length)


def taken(tokenizer: Any, made: Task, example: Example) -> int:
    """Tokens of a chat with the example, its answer included."""
    [question] = example.questions
    before, after = texts.chat_parts(tokenizer, example.context, question.text)
    return len(tokenizer(before + after + question.prefix)["input_ids"]) + made.generation.tokens


@pytest.mark.few(6)
@pytest.mark.cross
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("length", [600, 2000])
def test_lengths_are_filled_and_never_exceeded(name: str, length: int, tokenizer: Any) -> None:
    length = max(length, SHORTEST.get(name, 0))
    made = task(name, length)
    assert made.name == f"{name}@{length}"
    for example in made.examples(tokenizer, limit=4):
        # What is added is whole: a line with two uuids is some 80 tokens.
        assert 0.95 * length - 85 < taken(tokenizer, made, example) <= length
        assert example.facts == {"length": length}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MADE)
def test_examples_depend_on_index_and_seed_only(name: str, tokenizer: Any) -> None:
    made = task(name, max(700, SHORTEST.get(name, 0)))
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first = made.examples(tokenizer, limit=5)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(8)
    assert made.examples(tokenizer, limit=2) == first[:2]
    other = made.examples(tokenizer, limit=5, seed=1)
    prompts = {prompt_of(example) for example in (*first, *other)}
    assert len(prompts) == 10 and len({example.id for example in first}) == 5


@pytest.mark.parametrize("name", NEEDLES)
def test_every_needle_that_is_asked_for_lies_in_the_hay(name: str, tokenizer: Any) -> None:
    queries, values = (4 if name == f"niah_multi{what}" else 1 for what in ("query", "value"))
    places = []
    for example in task(name, 900).examples(tokenizer, limit=5):
        [question] = example.questions
        what = "uuids" if name.endswith("3") else "numbers"
        said = what if queries * values > 1 else what[:-1]
        asked = re.search(f" the special magic {said} for (.*) mentioned in the provided text\\?$", question.text)
        assert asked is not None and f" {said} for {asked[1]} mentioned" in question.prefix
        needles = re.findall(rf"One of the special magic {what} for (\S+) is: (\S+)\.", example.context)
        keys = re.split(r", and |, ", asked[1])
        assert len(keys) == queries
        key_of = {value: key for key, value in needles}
        ordered = sorted(question.target, key=lambda value: (keys.index(key_of[value]), example.context.index(value)))
        assert [value for key in keys for k, value in needles if k == key] == ordered
        assert len(question.target) == queries * values
        assert all(len(value) == (36 if what == "uuids" else 7) for value in question.target)
        assert len(needles) == (4 if name.startswith("niah_multi") else 1) or name in HAY
        places.append(example.context.index(question.target[0]) / len(example.context))
    assert max(places) - min(places) > 0.2


@pytest.mark.parametrize(
    "name, hay", [("niah_single_1", "noise"), ("niah_single_2", "essays"), ("niah_multikey_2", "needles")]
)
def test_hay(name: str, hay: str, tokenizer: Any) -> None:
    [example] = task(name, 900).examples(tokenizer, limit=1)
    lines = example.context.split("\n")[1:]
    needle = re.compile(r"One of the special magic numbers for \w+-\w+ is: \d{7}\.")
    if hay == "essays":
        rest = " ".join(needle.sub("", lines[0]).split())
        assert " ".join(texts.essay(texts.essays()[0]).split()).startswith(rest)
    elif hay == "noise":
        [found] = [line for line in lines if needle.fullmatch(line)]
        assert set(lines) - {found} == {
            "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
        }
    else:
        assert len(lines) > 10 and all(map(needle.fullmatch, lines))


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_need_no_harness_and_no_download(name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lm_eval", "nltk", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    assert len(task(name, 700).examples(tokenizer, limit=1)) == 1


def chase(text: str, value: str) -> set[str]:
    """Variables that get the value, whichever way round they are assigned."""
    pairs = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text)
    known = {value}
    while more := {name for name, source in pairs if source in known} - known:
        known |= more
    return known - {value}


def test_variables_follow_their_chain_and_one_is_shown(tokenizer: Any) -> None:
    for example in task("ruler_vt", 1000).examples(tokenizer, limit=5):
        [question] = example.questions
        shown, asked = re.split(r"\n\n\n\n(?=Memorize)", example.context)
        value = re.search(r"assigned the value (\d{5}) in", question.text)
        assert value is not None
        assert chase(asked, value[1]) == set(question.target) and len(question.target) == 5
        assert question.prefix.endswith(f"5 variables are assgined the value {value[1]}, they are:")
        head, _, answers = shown.rpartition("they are:")
        other = re.findall(r"assigned the value (\d{5}) in", head)[-1]
        assert chase(head, other) == set(answers.split()) and len(answers.split()) == 5
        assert not set(answers.split()) & set(question.target)


@pytest.mark.parametrize("length", [1000, 4096])
def test_common_words_are_the_most_common_and_a_list_is_shown(length: int, tokenizer: Any) -> None:
    for example in task("ruler_cwe", length).examples(tokenizer, limit=2):
        [question] = example.questions
        shown, asked = example.context.split("\nBelow")
        items = re.findall(r"(\d+)\. (\S+)", asked)
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        ranked = Counter(word for _, word in items).most_common()
        assert {word for word, _ in ranked[:10]} == set(question.target)
        assert ranked[9][1] > ranked[10][1]
        words, answers = shown.split(" Answer: The top 10 words that appear most often in the list are: ")
        counted = Counter(re.findall(r"\d+\. (\S+)", words)).most_common(10)
        assert {word for word, _ in counted} == set(re.findall(r"\d+\. (\S+)", answers))


@pytest.mark.parametrize("length", [260, 400, 1000, 3000])
def test_frequent_words_are_the_most_frequent_after_the_dots(length: int, tokenizer: Any) -> None:
    for example in task("ruler_fwe", length).examples(tokenizer, limit=3):
        words = example.context.split("coded words. ")[1].split()
        ranked = Counter(words).most_common()
        assert ranked[0][0] == "..."
        assert [word for word, _ in ranked[1:4]] == list(example.questions[0].target)
        assert ranked[1][1] > ranked[2][1] > ranked[3][1] > ranked[4][1]


def test_the_third_most_frequent_word_is_known_at_every_size() -> None:
    maker = FrequentWords(1000)
    for size in range(maker.smallest - 1, 300):
        with seeded("0 0"):
            context, question = maker.make(size, 0, 0)
        ranked = Counter(context.split("coded words. ")[1].split()).most_common()
        assert (ranked[3][1] > ranked[4][1]) == (size >= maker.smallest)
        assert size < maker.smallest or [word for word, _ in ranked[1:4]] == list(question.target)


def squad(folder: Path) -> None:
    """Three articles of four paragraphs, each with a question that has two answers, and one that has none."""

    def paragraph(place: str) -> dict[str, Any]:
        answers = [{"text": f"the {place} bridge"}, {"text": f"{place} Bridge"}]
        return {
            "context": f"At {place} the {place} bridge crosses the river. " + f"Boats wait at {place}. " * 5,
            "qas": [
                {"question": f"What crosses the river at {place}?", "answers": answers, "is_impossible": False},
                {"question": f"Who sank at {place}?", "answers": [], "is_impossible": True},
            ],
        }

    places = [[f"{a}{b}ville" for b in ("Ash", "Birch", "Cedar", "Elm")] for a in ("North", "South", "West")]
    data = {"data": [{"paragraphs": [paragraph(place) for place in row]} for row in places]}
    (folder / "squad.json").write_text(json.dumps(data), encoding="utf-8")


def hotpot(folder: Path) -> None:
    """Eight questions about two documents each; the last one's are long."""
    data = [
        {
            "question": f"What lies on river {n}?",
            "answer": f"Town {n}",
            "context": [
                [f"River {n}", [f"River {n} is long.", f" It is wet {n}." * (200 if n == 7 else 4)]],
                [f"Town {n}", [f"Town {n} lies on river {n}."]],
            ],
        }
        for n in range(8)
    ]
    (folder / "hotpot.json").write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize("name, write", zip(DOCUMENTS, (squad, hotpot), strict=True))
@pytest.mark.parametrize("length", [450, 700, 8000])
def test_documents_hold_what_is_asked_for(name: str, write: Any, length: int, tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path)
    made = task(name, length, tmp_path)
    examples = made.examples(tokenizer)
    # Those of the long documents are left out, unless all fit.
    questions = 12 if write is squad else 8 if length == 8000 else 7
    assert len({prompt_of(example) for example in examples}) == len(examples) == questions
    for example in examples:
        [question] = example.questions
        documents = re.split(r"Document \d+:\n", example.context)
        asked = re.fullmatch(r"(?s)(\n\nAnswer the question based.*)\n\nQuestion: (.*)", question.text)
        assert asked is not None and example.context.startswith(asked[1].lstrip()) and question.prefix == " Answer:"
        place = asked[2].split()[-1].rstrip("?")
        needed = (f"At {place} ",) if write is squad else (f"River {place}\nRiver", f"Town {place}\nTown")
        assert all(sum(document.startswith(start) for document in documents) == 1 for start in needed)
        assert set(question.target) == (
            {f"the {place} bridge", f"{place} Bridge"} if write is squad else {f"Town {place}"}
        )
        assert len(needed) < len(documents) - 1 == len(set(documents)) - 1
        assert length != 8000 or len(documents) - 1 == (12 if write is squad else 16)
        assert taken(tokenizer, made, example) <= length
    assert made.examples(tokenizer, limit=3) == examples[:3]
    assert [e.questions[0].text for e in made.examples(tokenizer, seed=1)] != [e.questions[0].text for e in examples]


@pytest.mark.parametrize("answers", [("alpha",), ("alpha", "Beta", "gamma"), ("alpha", "delta")])
@pytest.mark.parametrize("reply", ["Alpha, beta and GAMMA.", "\n\nalpha\tbeta", "nothing", "", "alp\nha gamma"])
def test_scores(reply: str, answers: tuple[str, ...]) -> None:
    question = Question("?", target=answers)
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    harness = string_match_all(postprocess_pred([reply]), [list(answers)])
    assert task("ruler_cwe", 4096).judge(question, reply) == {"match": harness}
    some = any(answer.lower() in reply.lower() for answer in answers)
    assert task("ruler_qa_squad", 4096).judge(question, reply) == {"match": float(some)}


def test_ruler_is_thirteen_tasks_at_every_length() -> None:
    found = find(["ruler"], TaskSettings(lengths=(512, 1024)))
    assert len({made.name for made in found}) == 26
    assert {made.name.partition("@")[0] for made in found} == {*MADE, *DOCUMENTS}
    # The paper's, by task.
    tokens = {made.name: made.generation.tokens for made in found}
    assert {tokens[f"{name}@512"] for name in NEEDLES} == {128}
    own = {"vt": 30, "cwe": 120, "fwe": 50, "qa_squad": 32, "qa_hotpot": 32}
    assert {name: tokens[f"ruler_{name}@512"] for name in own} == own


@pytest.mark.parametrize("name", MADE)
def test_too_short_a_length_says_how_much_is_needed(name: str, tokenizer: Any) -> None:
    with pytest.raises(KeepsetError, match=rf"^{name}@90 is too short: .* ask for a longer one\.$") as caught:
        task(name, 90).examples(tokenizer, limit=3)
    [least] = re.findall(r"takes (\d+) tokens", str(caught.value))
    assert int(least) > 90
    assert task(name, int(least) + 30).examples(tokenizer, limit=1)
    with pytest.raises(KeepsetError, match="is too short"):
        task(name, int(least) - 30).examples(tokenizer, limit=1)


def test_too_short_for_every_question(tmp_path: Path, tokenizer: Any) -> None:
    hotpot(tmp_path)
    with pytest.raises(KeepsetError, match="ruler_qa_hotpot@100 is too short"):
        task("ruler_qa_hotpot", 100, tmp_path).examples(tokenizer, limit=2)


@pytest.mark.parametrize("text", ["{}", "[1]", "not JSON", '{"data": [{"paragraphs": [{"qas": []}]}]}', "[]"])
@pytest.mark.parametrize("name", ["squad", "hotpot"])
def test_damaged_documents(name: str, text: str, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    with pytest.raises(KeepsetError, match=rf"{name}.json.* is not in the format of .*: put that file there\.$"):
        task(f"ruler_qa_{name}", 512, tmp_path).examples(tokenizer)


@pytest.mark.parametrize(
    "name, package, extra",
    [
        ("niah_single_1", "wonderwords", r"lm-eval\[ruler\]"),
        ("ruler_cwe", "wonderwords", r"lm-eval\[ruler\]"),
        ("ruler_vt", "lm_eval.tasks.ruler.vt_utils", r"lm-eval\[math\].*"),
    ],
)
def test_a_missing_package(
    name: str, package: str, extra: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.ruler.cwe_utils", raising=False)
    ruler_prompts._words.cache_clear()
    with pytest.raises(KeepsetError, match=rf'cannot be imported \(.*{package}.*\): run `pip install "{extra}"`\.$'):
        task(name, 1000).examples(tokenizer, limit=1)


@pytest.mark.parametrize("name", ["squad", "hotpot"])
def test_no_documents_no_network(name: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests
    from lm_eval.tasks.ruler import qa_utils

    def fail(url: str) -> None:
        assert url.startswith("https://")
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(qa_utils, "download_json", fail)
    with pytest.raises(
        KeepsetError, match=rf"The questions of {name} cannot be downloaded .* as {name}\.json, and give"
    ):
        task(f"ruler_qa_{name}", 512, tmp_path).examples(tokenizer)


# --- from files, told apart by hand

OWN = {  # by our name and theirs: context, question and prefix
    ("niah_multivalue", "niah_multivalue"): (
        "Some special magic numbers are hidden within the following text.\nOne of the special magic numbers is 1.",
        "\nWhat are all the special magic numbers for a mentioned in the provided text?",
        " The special magic numbers for a mentioned in the provided text are",
    ),
    ("ruler_vt", "vt"): (
        "Memorize.\n\nVAR A = 1\nQuestion: Find all variables. Answer: According to it: A\n\nVAR B = 2",
        "\nQuestion: Find all variables that are assigned the value 2 in the text above.",
        " Answer: According to the chain(s) of variable assignment, 1 variables are assigned: ",
    ),
    ("ruler_cwe", "cwe"): (
        "1. a 2. b\nQuestion: What are the 10 most common words? Answer: a\n1. c 2. d",
        "\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words are:",
    ),
    ("ruler_qa_squad", "qa_1"): (
        "Answer the question based on the given documents. Only.\n\nDocument 1:\nQuestion: not this. Answer: no.",
        "\n\nAnswer the question based on the given documents. Only.\n\nQuestion: Who said Answer: now?",
        " Answer:",
    ),
}


@pytest.mark.parametrize(("name", "theirs"), OWN)
@pytest.mark.parametrize("apart", [False, True])
def test_the_authors_files_are_cut_before_the_question(name: str, theirs: str, apart: bool, tmp_path: Path) -> None:
    context, question, prefix = OWN[name, theirs]
    whole = {"index": 0, "input": context + question + prefix, "outputs": ["1", "2"], "length": 64}
    if apart:
        whole |= {"input": context + question, "answer_prefix": prefix}
    write_items(tmp_path / "64" / theirs / "validation.jsonl", whole, whole)
    first, _ = examples_of(task(name, 64, tmp_path))
    [asked] = first.questions
    assert (first.context, asked.text, asked.prefix) == (context, question, prefix)
    assert asked.target == ("1", "2") and (first.id, first.facts) == ("0", {"length": 64})
    assert examples_of(task(name, 64, tmp_path), limit=1) == [first]


def test_kvpress_data_set_has_all_tasks_in_one_file(tmp_path: Path) -> None:
    item = {"context": "Text.\n", "question": "What? ", "answer_prefix": "Answer:", "answer": ["7"], "task": "qa_2"}
    write_items(tmp_path / "ruler@64.jsonl", item, {**item, "task": "fwe", "context": "Dots.\n"})
    [example] = examples_of(task("ruler_fwe", 64, tmp_path))
    [asked] = example.questions
    assert (example.context, asked.text, asked.prefix, asked.target) == ("Dots.\n", "What? ", "Answer:", ("7",))
    assert [one.context for one in examples_of(task("ruler_qa_hotpot", 64, tmp_path))] == ["Text.\n"]


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ({"input": "Which? Answer:", "outputs": ["1"]}, "line 1, has no question as RULER asks it"),
        ({"input": "Question: no", "outputs": ["1"]}, "line 1, has no question as RULER asks it"),
        ({"input": "Question: x Answer:", "outputs": "1"}, "line 1, has outputs that are no list of answers"),
        ({"outputs": ["1"]}, "line 1, lacks the field 'input'"),
    ],
)
def test_lines_that_are_something_else_are_refused(tmp_path: Path, item: dict[str, Any], sentence: str) -> None:
    write_items(tmp_path / "64" / "vt" / "validation.jsonl", item)
    with pytest.raises(KeepsetError, match=sentence):
        examples_of(task("ruler_vt", 64, tmp_path))
