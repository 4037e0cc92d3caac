"""Tasks of lm-evaluation-harness, held against what its own evaluator asks of a model and makes of the answers."""

import json
import pickle
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from keepset import KeepsetError
from keepset.lab.tasks.find import check_names, find
from keepset.lab.tasks.task import Example, Generation, Reply, TaskSettings
from tests.lab.tasks.scaffold import WITH_HARNESS, examples_of, make_task, prompt_of, write_items

pytestmark = WITH_HARNESS

WORDS = ["kept", "dropped", "2020-01-01", "of the cache", "Ünits", "12"]
ITEMS = [
    {
        "passage": f" Passage {n}: {WORDS[n]} and\n{WORDS[-n]}. ",
        "question": f"Which is number {n}?",
        "choices": [WORDS[n], WORDS[(n + 1) % 6], "both of them"],
        "answer": WORDS[n],
        "label": n % 3,
    }
    for n in range(6)
]
SHOTS = [{**item, "question": f"Example {n}?"} for n, item in enumerate(ITEMS)]
PROMPT = "{{passage}}\nQ: {{question}}\nA:"
COMMON = {"dataset_path": "json", "test_split": "test", "fewshot_split": "train", "doc_to_text": PROMPT}
KINDS: dict[str, dict[str, Any]] = yaml.safe_load("""
write:
  output_type: generate_until
  doc_to_target: "{{answer}}"
  generation_kwargs: {until: [".", "Q:"], max_gen_toks: 7}
  filter_list:
    - {name: strict, filter: [{function: regex, regex_pattern: 'is (\\w+)'}, {function: take_first}]}
    - {name: loose, filter: [{function: regex, regex_pattern: '(\\w+)'}, {function: take_first}]}
  metric_list: [{metric: exact_match, ignore_case: true, aggregation: mean, higher_is_better: true}]
prefixed:
  output_type: generate_until
  doc_to_text: "Q: {{question}}"
  doc_to_target: "{{answer}}"
  description: "Say what is asked.\\n\\n"
  gen_prefix: The answer is
  generation_kwargs: {until: "\\n"}
  metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
choose:
  output_type: multiple_choice
  doc_to_choice: "{{choices}}"
  doc_to_target: "{{label}}"
  description: "Choose.\\n"
  metric_list:
    - {metric: mcc, aggregation: matthews_corrcoef, higher_is_better: true}
    - {metric: acc, aggregation: mean, higher_is_better: true}
    - {metric: acc_norm, aggregation: mean, higher_is_better: true}
    - {metric: acc_mutual_info, aggregation: mean, higher_is_better: true}
predict:
  output_type: loglikelihood
  doc_to_text: "{{passage}}"
  doc_to_target: " {{answer}}"
  metric_list:
    - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
    - {metric: acc, aggregation: mean, higher_is_better: true}
""")
METRICS = {
    "write": ["exact_match,strict", "exact_match,loose"],
    "prefixed": ["exact_match,none"],
    "choose": ["acc,none", "acc_norm,none"],
    "predict": ["acc,none"],
}


def define(folder: Path, name: str, **changes: Any) -> str:
    """The path of a task's definition, beside its data."""
    splits = {"test": ITEMS, "train": SHOTS}
    files = {split: str(write_items(folder / f"{split}.jsonl", *items)) for split, items in splits.items()}
    own = {"dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}}
    path = folder / f"{name}.yaml"
    # JSON is YAML.
    path.write_text(json.dumps({"task": name, **COMMON, **own, **KINDS[name], **changes}), encoding="utf-8")
    return str(path)


def stub_model() -> Any:
    """A model of the harness that answers by what it was asked, and remembers it."""
    from lm_eval.api.model import LM

    class Stub(LM):
        asked: ClassVar[list[Any]] = []

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            self.asked += [request.args for request in requests]
            return [likelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise AssertionError

        def generate_until(self, requests: list[Any]) -> list[str]:
            self.asked += [request.args[:1] for request in requests]
            return [answer(request.args[0]) for request in requests]

    return Stub()


def answer(prompt: str) -> str:
    """Right or wrong, in a sentence or alone."""
    item = max(ITEMS, key=lambda item: prompt.rfind(item["question"]))
    drawn = zlib.crc32(prompt.encode())
    said = item["answer"] if drawn % 3 else "wrong"
    return f"It is {said}" if drawn % 2 else said


def likelihood(prompt: str, choice: str) -> tuple[float, bool]:
    drawn = zlib.crc32(f"{prompt}|{choice}".encode())
    return -(drawn % 1000) / 10, drawn % 2 == 0


def reply(example: Example) -> Reply:
    [question], prompt = example.questions, prompt_of(example)
    return [likelihood(prompt, choice) for choice in question.choices] if question.choices else answer(prompt)


@pytest.mark.parametrize("shots", [pytest.param(0, marks=pytest.mark.full), 2])
def test_prompts_and_scores_are_those_of_the_harness_s_own_evaluator(tmp_path: Path, shots: int) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    paths, stub = {name: define(tmp_path, name, num_fewshot=shots) for name in KINDS}, stub_model()
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    own: Any = simple_evaluate(stub, tasks=list(KINDS), task_manager=manager, bootstrap_iters=0)
    asked: list[Any] = []
    for name, path in paths.items():
        task, totals = make_task(path), dict.fromkeys(METRICS[name], 0.0)
        assert task.metric == next(iter(totals))
        examples = examples_of(task)
        assert len({example.id for example in examples}) == len(examples) == len(ITEMS)
        for example in examples:
            [question], prompt = example.questions, prompt_of(example)
            asked += [(prompt, choice) for choice in question.choices] or [(prompt,)]
            for key, score in task.judge(question, reply(example)).items():
                totals[key] += score
        assert max(totals.values()) > 0
        for key, total in totals.items():
            assert total / len(ITEMS) == pytest.approx(own["results"][name][key])
    # Mutual information asks about every choice alone, too.
    assert sorted(asked) == sorted(arguments for arguments in stub.asked if arguments[0])


@pytest.mark.parametrize(
    "doc, asked, context",
    [
        ({"input": "A text.", "question": "Why?"}, "A text.\nWhy?", "Shown\n\nA text."),
        ({"input": "A text.", "target": "Why?"}, "A text.\nWhy?", "Shown"),
        ({"story": "A text.", "context": "A text.\nWhy"}, "A text.\nWhy?", "Shown\n\nA text.\nWhy"),
        ({"article": "Shown"}, "A text.\nWhy?", "Shown"),
        ({"article": "A text.\nWhy?"}, "A text.\nWhy?", "Shown"),
        ({"article": " "}, "Why?", "Shown\n\nA text."),
        ({"passage": ["A text."]}, "", ""),
    ],
)
def test_where_a_prompt_is_cut(doc: dict[str, Any], asked: str, context: str) -> None:
    from keepset.lab.tasks import harness

    prompt = "Shown\n\nA text.\nWhy?"
    assert harness._split(prompt, asked, doc) == (context, prompt[len(context) :])


def test_how_answers_are_generated_is_the_task_s_and_a_limit_changes_no_prompt(tmp_path: Path) -> None:
    for name, changes, generation, decodes in [
        ("write", {}, Generation(7, (".", "Q:")), False),
        ("prefixed", {}, Generation(256, ("\n",)), False),
        ("write", {"generation_kwargs": {"max_gen_toks": 2048}}, Generation(2048, ("\n\n",)), True),
    ]:
        task = make_task(define(tmp_path, name, **changes))
        assert (task.generation, task.decodes) == (generation, decodes)
    path = define(tmp_path, "choose", num_fewshot=2)
    state = random.getstate()
    every = examples_of(make_task(path))
    task = make_task(path)
    for limit in (3, 0, 1, 100):
        assert task.examples(None, limit=limit, seed=limit) == every[:limit]  # type: ignore[arg-type]
    assert random.getstate() == state


def test_a_task_that_was_sent_is_the_same(tmp_path: Path) -> None:
    task = make_task(define(tmp_path, "choose", num_fewshot=2))
    sent = pickle.dumps(task)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert again.name == task.name and again is not task
    assert examples_of(again) == examples_of(task)
    assert pickle.loads(sent) is again
    task.generation = replace(task.generation, tokens=3)
    assert pickle.loads(pickle.dumps(task)).generation == task.generation != again.generation


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for data, and a harness that knows the four tasks, two known ones, a group and a tag."""
    from lm_eval.tasks import TaskManager

    from keepset.lab.tasks import harness

    own, data = tmp_path / "harness", tmp_path / "data"
    own.mkdir()
    data.mkdir()
    for name in KINDS:
        define(own, name, num_fewshot=2, **({"tag": "some"} if name in ("write", "choose") else {}))
    group = {"group": "all", "task": ["write", "choose", {"task": "prefixed", "num_fewshot": 1}]}
    own.joinpath("all.yaml").write_text(json.dumps(group), encoding="utf-8")
    for name in ("hellaswag", "gsm8k"):
        own.joinpath(f"{name}.yaml").write_text(f"task: {name}\ndataset_path: x", encoding="utf-8")
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_path=str(own), include_defaults=False))
    monkeypatch.setattr("keepset.lab.tasks.find.harness_folder", lambda: own)
    harness._manager.cache_clear()
    yield data
    harness._manager.cache_clear()


def test_groups_and_tags_stand_for_their_tasks_and_a_program_takes_no_data_from_a_folder(folder: Path) -> None:
    for names, found in [
        (["all"], ["write", "choose", "prefixed"]),
        (["some"], ["choose", "write"]),
        (["predict", "some", "write", "all", "predict"], ["predict", "choose", "write", "prefixed"]),
    ]:
        assert [task.name for task in find(names, TaskSettings())] == found
    folder.parent.joinpath("harness", "own.py").write_text("class Own: ...", encoding="utf-8")
    folder.parent.joinpath("harness", "own.yaml").write_text("task: own\nclass: !function own.Own\n", encoding="utf-8")
    write_items(folder / "own.jsonl", *ITEMS)
    with pytest.raises(KeepsetError, match=r"own is a program .*: take own\.jsonl out of the folder"):
        find(["own"], TaskSettings(data=folder))


def test_items_and_examples_come_from_a_folder_and_an_item_is_never_its_own_example(folder: Path) -> None:
    items = [{"passage": f"P{n}", "question": f"20{n}0-01-01", "answer": f"A{n}", "extra": n} for n in range(4)]
    write_items(folder / "write.jsonl", *items)
    write_items(folder / "unknown.jsonl", {})
    task = make_task("write", folder)
    for n, example in enumerate(examples_of(task)):
        assert example.context.endswith(f"P{n}") and example.questions[0].text == f"\nQ: 20{n}0-01-01\nA:"
        shown = [m for m in range(4) if f"P{m}\nQ: 20{m}0-01-01\nA: A{m}" in example.context]
        assert len(shown) == 2 and n not in shown
    [other] = examples_of(make_task("choose", folder), limit=1)
    assert other.context.endswith(ITEMS[0]["passage"].rstrip())
    write_items(folder / "prefixed.jsonl", *ITEMS[:1])
    write_items(folder / "prefixed.train.jsonl", *SHOTS[2:4])
    [grouped] = [task for task in find(["all"], TaskSettings(data=folder)) if task.name == "prefixed"]
    for task, count in ((make_task("prefixed", folder), 2), (grouped, 1)):
        [example] = examples_of(task)
        assert sum(f"Q: Example {n}? The answer is" in example.context for n in (2, 3)) == count
        assert example.context.count("Q:") == count


@pytest.mark.parametrize(
    "items, sentence",
    [
        ([], r"choose.jsonl is empty"),
        ([ITEMS[0], {"passage": ""}], r"choose.jsonl, line 2, lacks the field 'answer' or 'choices' or"),
        ([{"question": "?"}] * 4, r"choose cannot be loaded \('passage' is undefined\): check the connection"),
        ([ITEMS[0], {**ITEMS[1], "label": "one"}], "choose cannot be loaded"),
    ],
)
def test_bad_data_are_one_sentence(folder: Path, items: list[dict[str, Any]], sentence: str) -> None:
    write_items(folder / "choose.jsonl", *items)
    with pytest.raises(KeepsetError, match=sentence):
        find(["choose"], TaskSettings(data=folder))
    assert make_task("write", folder).name == "write"


PERPLEXITY, LOW = (
    [{"metric": "word_perplexity"}],
    [{"metric": "bleu"}, {"metric": "brier_score", "aggregation": "mean"}],
)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"output_type": "loglikelihood_rolling", "metric_list": PERPLEXITY}, "no prompt to compress"),
        ({"repeats": 8}, "write asks for 8 answers to every question, and one is evaluated: leave it out"),
        ({"unsafe_code": True}, "write runs code that the model writes"),
        ({"doc_to_image": "passage"}, "write asks about images or sounds"),
        ({"metric_list": LOW}, "write is measured by bleu, brier_score: none is a mean over items that is higher when"),
    ],
)
def test_other_kinds_of_tasks_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        find([define(tmp_path, "write", **changes)], TaskSettings())


def test_choices_inside_prompts_and_scores_that_are_no_shares_are_refused(tmp_path: Path) -> None:
    task = make_task(define(tmp_path, "choose", doc_to_text="{{label}}", doc_to_target="{{answer}}"))
    with pytest.raises(KeepsetError, match="choose asks for the answers to several prompts at once"):
        examples_of(task)
    task = make_task(define(tmp_path, "write", filter_list=None))
    [example] = examples_of(task, limit=1)
    for scores, said in [
        ({"exact_match": 37.5}, r"exact_match,none of 37\.5"),
        ({"other": 1.0}, "nothing: exact_match"),
    ]:
        task._task.process_results = lambda doc, results, scores=scores: scores  # type: ignore[attr-defined]
        with pytest.raises(KeepsetError, match=f"write scores an answer with {said}"):
            task.judge(example.questions[0], "It")


# --- tasks by the names that users write


@pytest.mark.usefixtures("folder")
def test_a_misspelt_name_is_told_before_the_harness_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepset.lab.tasks import harness

    monkeypatch.setattr(harness, "TaskManager", None)  # it would be called
    for name in ("hellaswg", ""):
        with pytest.raises(KeepsetError, match="There is no task"):
            check_names(["needle", name])
    check_names(["needle", "hellaswag", "a/file/of/mine.yaml"])


@pytest.mark.usefixtures("folder")
def test_tasks_come_in_the_order_of_their_names_and_each_once() -> None:
    settings = TaskSettings(lengths=(512, 1024))
    tasks = find(["needle", "aime24", "needle", "gsm8k", "aime24"], settings)
    assert [task.name for task in tasks] == ["needle@512", "needle@1024", "aime24", "gsm8k"]
    assert tasks[-1].metric == "accuracy"  # keepset's own, not the harness's
    every = [task.name for task in find(["ruler"], TaskSettings())]
    mixed = [task.name for task in find(["niah_single_2", "ruler"], TaskSettings())]
    assert mixed[0] == "niah_single_2@4096" != every[0] and sorted(mixed) == sorted(every)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "name, sentence",
    [
        ("gsm8", "There is no task 'gsm8'; did you mean 'gsm8k'?"),
        ("hellaswg", "There is no task 'hellaswg'; did you mean 'hellaswag'?"),
        ("niah_single1", "did you mean 'niah_single_1', 'niah_single_"),
        ("needle@4096", "There is no task 'needle@4096'; did you mean 'needle'"),
        ("no/such/file.yaml", "There is no task 'no/such/file.yaml'"),
        ("", "There is no task ''; name one such as gsm8k"),
    ],
)
def test_an_unknown_name_is_one_sentence_with_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(KeepsetError) as caught:
        find(["aime24", name], TaskSettings())
    assert sentence in str(caught.value)
    with pytest.raises(KeepsetError, match="There is no task to evaluate: name one, such as gsm8k"):
        find([], TaskSettings())


def test_without_the_harness_and_settings_out_of_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(KeepsetError) as caught:
        find(["hellaswag"], TaskSettings())
    assert "no task 'hellaswag' without lm-evaluation-harness: `pip install \"lm-eval[math]" in str(caught.value)
    assert find(["needle"], TaskSettings())[0].name == "needle@4096"
    with pytest.raises(KeepsetError, match=r"There is no folder '.*nowhere' to take data from"):
        TaskSettings(data=tmp_path / "nowhere")
    for lengths in ((), (4096, 0)):
        with pytest.raises(KeepsetError, match=r"lengths=.* are no lengths in tokens"):
            TaskSettings(lengths=lengths)
