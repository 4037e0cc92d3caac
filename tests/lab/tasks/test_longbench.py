"""LongBench on a miniature of the official files, beside the harness's own tasks on the same records; LongBench v2."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from keepset import KeepsetError
from keepset.lab.tasks import longbench, longbench2
from keepset.lab.tasks.find import find
from keepset.lab.tasks.task import Question, Task, TaskSettings
from tests.lab.tasks.scaffold import WITH_HARNESS, examples_of, make_task, write_items

pytestmark = WITH_HARNESS

MINIATURE = Path(__file__).parent / "longbench"
TASKS = longbench.NAMES[:-1]
FIRST_LINES = ["longbench_trec", "longbench_triviaqa", "longbench_samsum"]


def task(name: str, data: Path | None = MINIATURE) -> Task:
    return make_task(name, data)


def records(name: str) -> list[dict[str, Any]]:
    path = MINIATURE / f"{name.removeprefix('longbench_')}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def manager() -> Any:
    from lm_eval import tasks

    folder = Path(tasks.__file__).parent / "longbench"
    return tasks.TaskManager(include_defaults=False, include_path=str(folder))


def test_a_package_that_is_missing(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    with pytest.raises(KeepsetError, match=r'\(import of jieba .*\): run `pip install "lm-eval\[longbench\]"`\.$'):
        task("longbench_qasper").examples(tokenizer)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", TASKS)
def test_prompts_and_scores_agree(name: str, manager: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    documents = [{**record, "question": record["input"]} for record in records(name)]
    found = {"test": datasets.Dataset.from_list(documents)}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    harness = manager.load([name])["tasks"][name]
    made = task(name)
    examples = made.examples(tokenizer)
    assert len(examples) == len(documents) and made.examples(tokenizer, limit=1, seed=3) == examples[:1]
    for example, document in zip(examples, harness.test_docs(), strict=True):
        [question] = example.questions
        assert example.id == document["_id"]
        assert example.context.endswith(document["context"])
        assert example.context + question.text == harness.doc_to_text(document)
        right = document["answers"][-1]
        replies = [right, right + " or not, 5", "Paragraph 2. No: 3", "Individual", " yes ", "no", ""]
        scores = [made.judge(question, reply) for reply in replies]
        assert scores == [
            pytest.approx({made.metric: harness.process_results(document, [reply])[made.metric]}) for reply in replies
        ]
        assert scores[0][made.metric] == pytest.approx(1.0) and scores[-1][made.metric] == 0.0
    options = harness.config.generation_kwargs
    assert made.generation.tokens == options["max_gen_toks"] and made.generation.until == ()
    assert (options["until"] == ["\n"]) == (name in FIRST_LINES)


@pytest.mark.parametrize("name", TASKS)
def test_few_shot_answers_are_their_first_line_and_others_all_lines(name: str, tokenizer: Any) -> None:
    made = task(name)
    [question] = made.examples(tokenizer, limit=1)[0].questions
    right = question.target["answers"][0]
    late = made.judge(question, f"\n\n{right}\nDialogue: 7 words that Paragraph 9 did not say")[made.metric]
    missed = made.judge(question, f"Something else\n{right}")[made.metric]
    if name in FIRST_LINES:
        assert late == pytest.approx(1.0) and missed == 0.0
    elif made.metric == "code_sim_score":
        assert late == pytest.approx(1.0) and missed < 0.6
    else:
        assert 0.0 < late < 1.0 and missed > 0.0


def test_a_class_within_another_counts_as_the_authors_count_it_and_the_best_of_several_answers(tokenizer: Any) -> None:
    made = task("longbench_trec")
    [question] = made.examples(tokenizer)[1].questions
    assert question.target["answers"] == ["Other entity"] and "Entity" in question.target["all_classes"]
    assert made.judge(question, "Other entity") == {made.metric: 1.0}
    assert made.judge(question, "Other entity or Number") == {made.metric: 0.5}
    assert made.judge(question, "Entity") == {made.metric: 0.0}
    made = task("longbench_qasper")
    [question] = made.examples(tokenizer)[0].questions
    assert len(question.target["answers"]) == 2
    assert [made.judge(question, answer)[made.metric] for answer in question.target["answers"]] == [1.0, 1.0]


def test_longbench_is_sixteen_tasks_and_longbench2_six_domains() -> None:
    # Examples and code are asked without a chat template.
    found = find(["longbench"], TaskSettings(MINIATURE))
    assert [made.name for made in found] == list(TASKS) and len(TASKS) == 16
    verbatim = {made.name for made in found if not made.chat}
    assert verbatim == {*FIRST_LINES, "longbench_lcc", "longbench_repobench-p"}
    tasks = find(["longbench2"], TaskSettings())
    assert [made.name for made in tasks] == list(longbench2.NAMES[:-1]) and len(tasks) == 6
    assert all(made.generation.tokens == 128 and not made.decodes for made in tasks)


def test_the_harness_data_set_on_the_hub(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says `question` where the official files say `input`."""
    import datasets

    asked = []

    def load_dataset(path: str, name: str, *, split: str) -> Any:
        asked.append((path, name, split))
        return datasets.Dataset.from_list(
            [{"question" if key == "input" else key: value for key, value in row.items()} for row in records("qasper")]
        )

    monkeypatch.setattr("keepset.models.hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    online = task("longbench_qasper", None)
    assert asked == []
    assert online.examples(tokenizer) == task("longbench_qasper").examples(tokenizer)
    assert [(name, split) for _, name, split in asked] == [("qasper", "test")]

    def nothing(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", nothing)
    with pytest.raises(KeepsetError, match=r"qasper cannot be loaded .*give a folder with qasper\.jsonl"):
        task("longbench_qasper", tmp_path).examples(tokenizer)  # a folder without it


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qasper", {"context": None}, r"qasper\.jsonl, line 1, lacks the field 'context'"),
        ("qasper", {"answers": None}, r"qasper\.jsonl, line 1, lacks the field 'answers'"),
        ("qasper", {"input": None}, r"qasper\.jsonl, line 1, lacks the field 'question' or 'input'"),
        ("qasper", {"answers": 7}, r"qasper\.jsonl, line 1, has answers that longbench_qasper cannot judge by"),
        ("qasper", {"answers": "yes"}, r"qasper\.jsonl, line 1, has answers that"),
        ("qasper", {"answers": []}, r"qasper\.jsonl, line 1, has answers that"),
        ("qasper", {"answers": [7]}, r"qasper\.jsonl, line 1, has answers that"),
        ("trec", {"all_classes": None}, r"trec\.jsonl, line 1, has answers that"),
        ("passage_retrieval_en", {"answers": ["two"]}, r"line 1, has answers that"),
    ],
)
def test_damaged_records(name: str, change: dict[str, Any], message: str, tmp_path: Path, tokenizer: Any) -> None:
    record = {**records(name)[0], **change}
    write_items(tmp_path / f"{name}.jsonl", record)
    with pytest.raises(KeepsetError, match=message):
        task(f"longbench_{name}", tmp_path).examples(tokenizer)


# --- LongBench v2, on records made up in the form of the official file

CHOICES = {"choice_A": "The first", "choice_B": "The second ", "choice_C": "Neither", "choice_D": "Both", "answer": "B"}
FACTS = {"sub_domain": "Academic", "difficulty": "hard", "length": "short"}
ASKED = {"question": " Which one is it? ", "context": "A long text.\n", **CHOICES}
RECORD: dict[str, Any] = {"_id": "66f3", "domain": "Multi-Document QA", **FACTS, **ASKED}
PROMPT = """Please read the following text and answer the question below.

<text>
A long text.
</text>

What is the correct answer to this question: Which one is it?
Choices:
(A) The first
(B) The second
(C) Neither
(D) Both

Format your response as follows: "The correct answer is (insert answer here)"."""


def examples(folder: Path, *items: dict[str, Any], name: str = "longbench2_multi") -> Any:
    write_items(folder / "longbench2.jsonl", *items)
    return examples_of(make_task(name, folder))


def test_the_prompt_is_the_authors_and_the_text_is_its_context(tmp_path: Path) -> None:
    other = {**RECORD, "_id": "other", "domain": "Code Repository Understanding"}
    [example] = examples(tmp_path, other, RECORD)
    [question] = example.questions
    assert example.context + question.text == PROMPT and example.context.endswith("</text>")
    assert (example.id, question.target, question.prefix, question.choices) == ("66f3", "B", "", ())
    assert example.facts == FACTS
    assert [one.id for one in examples(tmp_path, other, RECORD, name="longbench2_code")] == ["other"]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("The correct answer is (B).", True),
        ("**The correct answer is** (B)", True),
        ("Well. The correct answer is B, I think", True),
        ("The correct answer is A. No: The correct answer is (B)", True),  # brackets come first
        ("The correct answer is (A), or The correct answer is (B)", False),
        ("the correct answer is (B)", False),
        ("The correct answer is The second", False),
        ("(B)", False),
        ("", False),
    ],
)
def test_an_answer_is_found_as_the_authors_find_it(reply: str, right: bool) -> None:
    assert make_task("longbench2_single").judge(Question("?", target="B"), reply) == {"accuracy": float(right)}


@pytest.mark.parametrize(
    ("record", "name", "sentence"),
    [
        (RECORD, "longbench2_single", "has no item of the domain 'Single-Document QA'"),
        ({**RECORD, "answer": "E"}, "longbench2_multi", "has the answer 'E', which is none of A, B, C and D"),
        ({**RECORD, "choice_D": None}, "longbench2_multi", "line 1, lacks the field 'choice_D'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, record: dict[str, Any], name: str, sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        examples(tmp_path, record, name=name)
