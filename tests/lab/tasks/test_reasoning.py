"""Problems with an exact answer: prompts from data in several forms, and answers judged."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from keepset import KeepsetError
from keepset.lab.tasks import reasoning
from keepset.lab.tasks.task import Example, Generation, Question
from tests.lab.tasks.scaffold import examples_of, make_task, write_items

pytest.importorskip("math_verify", reason='pip install ".[eval]"')
pytest.importorskip("datasets", reason='pip install ".[eval]"')

import datasets

ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def examples(folder: Path, name: str, *items: dict[str, Any], limit: int | None = None) -> Sequence[Example]:
    write_items(folder / f"{name}.jsonl", *items)
    return examples_of(make_task(name, folder), limit=limit)


@pytest.mark.parametrize(
    "name, item, prompt, gold",
    [
        ("gsm8k", {"question": "How many?", "answer": "1+1=<<1+1=2>>2\n#### 2,000"}, "How many?" + ASK, "2000"),
        ("gsm8k", {"question": "How many?", "answer": "18"}, "How many?" + ASK, "18"),
        ("math500", {"prompt": "Solve it" + ASK, "answer": "p - q"}, "Solve it" + ASK, "p-q"),
        ("math500", {"problem": "Solve it", "answer": "3", "solution": "It is 4"}, "Solve it" + ASK, "3"),
        ("math500", {"problem": "Solve it", "solution": "So 2, or $\\boxed{3}$."}, "Solve it" + ASK, "3"),
        ("aime24", {"Problem": "Find it", "Answer": 204, "ID": 1}, "Find it" + ASK, "204"),
        ("aime25", {"problem": "Find it", "answer": "070", "id": "0"}, "Find it" + ASK, "70"),
        ("aime25", {"prompt": "Find it", "answer": 70}, "Find it", "70"),
    ],
)
def test_data_in_all_their_forms(tmp_path: Path, name: str, item: dict[str, Any], prompt: str, gold: str) -> None:
    [example] = examples(tmp_path, name, item)
    [question] = example.questions
    assert (example.id, example.context, question.text, question.prefix, question.choices) == ("0", "", prompt, "", ())
    assert make_task(name).judge(question, f"So it is \\boxed{{{gold}}}.") == {"accuracy": 1.0}
    assert make_task(name).judge(question, f"So it is \\boxed{{{gold} + 1}}.") == {"accuracy": 0.0}


def test_examples_come_in_order_from_a_folder_or_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"problem": "Solve it", "answer": "3", "subject": "Number Theory", "level": 4, "unique_id": "x"}
    assert examples(tmp_path, "math500", item)[0].facts == {"subject": "Number Theory", "level": 4}
    assert examples(tmp_path, "math500", {**item, "subject": None, "level": [4]})[0].facts == {}
    items = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(5)]
    every = examples(tmp_path, "gsm8k", *items)
    assert [example.questions[0].text for example in every] == [f"{n}?{ASK}" for n in range(5)]
    assert len({example.id for example in every}) == 5
    assert examples(tmp_path, "gsm8k", *items, limit=2) == every[:2]
    asked = []

    def load(path: str, name: str | None, split: str) -> list[dict[str, object]]:
        asked.append((path, name, split))
        return [{"Problem": "Find it.", "Answer": 204}, {"Problem": "Find it.", "Answer": None}]

    monkeypatch.setattr("keepset.models.hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(KeepsetError, match=r"Maxwell-Jia/AIME_2024, item 1, lacks the field 'answer'"):
        examples_of(make_task("aime24"))
    assert asked == [("Maxwell-Jia/AIME_2024", None, "train")]


def test_answers_are_long_and_judged_in_threads_too() -> None:
    for name, tokens in {"gsm8k": 1024, "math500": 16384, "aime24": 32768, "aime25": 32768}.items():
        made = make_task(name)
        assert (made.name, made.metric, made.decodes, made.generation) == (name, "accuracy", True, Generation(tokens))
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda number: reasoning.agree("\\boxed{3}", f"\\boxed{{{number}}}"), range(6))
    assert list(found) == [number == 3 for number in range(6)]


RIGHT = [
    ("18", "So she makes 9 * 2 = $\\boxed{18}$ dollars."),
    ("18", "She has 16 - 3 - 4 = 9 left.\n#### 18"),
    ("18", "The answer is 9 for one, so 2 * 9 = 18 for both.\n####18"),
    ("18", "\\boxed{\\$18.00}"),
    ("18", "\\boxed{18\\text{ dollars}}"),
    ("18", "\\boxed{x = 18}"),
    ("18", "The answer is 18."),
    ("18", "It could be \\boxed{3}. But wait, try again: it is \\boxed{18}."),
    ("18", "<think>Perhaps 17.</think>\n**Final answer**\n\\[ \\boxed{18} \\]"),
    ("1234", "\\boxed{1,234}"),
    ("25", "\\boxed{025}"),
    ("\\frac{14}{3}", "\\boxed{\\dfrac{28}{6}}"),
    ("\\frac{1}{2}", "\\boxed{0.5}"),
    ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}"),
    ("(3, \\frac{\\pi}{2})", "\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}"),
    ("x + 1", "\\boxed{1 + x}"),
    ("90^\\circ", "\\boxed{90}"),
    ("\\text{Evelyn}", "\\boxed{Evelyn}"),
    ("5\\text{ cm}", "\\boxed{5}"),
]
WRONG = [
    ("18", ""),
    ("18", "\\boxed{}"),
    ("18", "\\boxed{18"),
    ("18", "\\boxed{-18}"),
    ("18", "It is \\boxed{18}. No, it is \\boxed{17}."),
    ("18", "I do not know, \u2603 }{ $$ \\frac{ \x00"),
    ("18", "18 of them, so the answer is 9."),
    ("(1, 2)", "\\boxed{(2, 1)}"),
    ("(2, 5]", "\\boxed{(2, 5)}"),
    ("\\text{Evelyn}", "\\boxed{Eve}"),
    ("18", "\\boxed{__import__('os').getpid()}"),
]


@pytest.mark.parametrize("gold, reply, right", [*((*pair, 1.0) for pair in RIGHT), *((*pair, 0.0) for pair in WRONG)])
def test_answers_by_hand(gold: str, reply: str, right: float) -> None:
    assert make_task("math500").judge(Question("?", target=f"\\boxed{{{gold}}}"), reply) == {"accuracy": right}


@pytest.mark.full
def test_after_a_slow_answer_or_a_killed_judge_the_next_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasoning.start()
    first = reasoning._process
    monkeypatch.setattr(reasoning, "_SECONDS", 0.2)
    assert not reasoning.agree("\\boxed{2}", "\\boxed{9^{9^{9^9}}}")
    assert first is not None and first.poll() is not None
    monkeypatch.undo()
    assert reasoning.agree("\\boxed{2}", "\\boxed{2}")
    assert reasoning._process is not None
    reasoning._process.kill()
    reasoning._process.wait()
    assert reasoning.agree("\\boxed{2}", "\\boxed{2}")


def test_without_math_verify_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "_process", None)
    monkeypatch.setattr(reasoning, "_PROGRAM", "import no_such_package_at_all")
    with pytest.raises(KeepsetError, match=r'math-verify, which does not start: run `pip install "lm-eval'):
        make_task("gsm8k")


@pytest.mark.parametrize(
    "name, item, sentence",
    [
        ("gsm8k", {"answer": "#### 1"}, "gsm8k.jsonl, line 1, lacks the field 'question' or 'problem'"),
        ("aime24", {"Problem": "x"}, "aime24.jsonl, line 1, lacks the field 'answer' or 'Answer' or 'solution'"),
    ],
)
def test_missing_fields_are_one_sentence(tmp_path: Path, name: str, item: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        examples(tmp_path, name, item)
