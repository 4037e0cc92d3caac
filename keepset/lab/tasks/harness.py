"""Tasks of lm-evaluation-harness, with its prompts verbatim, its filters and its metrics."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind

from keepset.errors import KeepsetError
from keepset.lab.tasks.data import import_extra, loading, read_records, seeded
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

_log = logging.getLogger("lm_eval")
_SEED = 1234
"""The harness's seed for few-shot examples. Prompts do not depend on the sweep's seed."""
_DOCUMENTS = ("context", "passage", "article", "document", "story", "paragraph")
"""Names of fields with a text to which the question refers."""
_LONG = 1024
"""An answer with at least this many tokens is long."""


def knows(name: str, settings: TaskSettings) -> bool:
    """Return whether the name is a task, group or tag of the harness, or a YAML file.

    Args:
        name: the name.
        settings: the settings, which may name a user's folder.
    """
    return _is_file(name) or name in _manager(settings.data).task_index


def make(name: str, settings: TaskSettings) -> list[HarnessTask]:
    """Return the harness's task, or all tasks of a group or tag, or the task of a YAML file.

    A task takes its items from `<name>.jsonl` if the folder `settings.data` has that file. The few-shot examples then
    come from `<name>.<split>.jsonl`, with the name of the split that the task takes them from. Without that file they
    come from the other items.

    Args:
        name: the name.
        settings: the settings, which may name a user's folder.

    Raises:
        KeepsetError: data cannot be loaded, or a task cannot be compared by item.
    """
    # A file is a task by itself, and the harness takes seconds to read its thousands of tasks.
    manager = TaskManager(include_defaults=False) if _is_file(name) else _manager(settings.data)
    with loading(name), _prepared():
        loaded = manager.load(name)["tasks"]
    return [HarnessTask(str(task_name), task, (name, settings)) for task_name, task in loaded.items()]


class HarnessTask(Task):
    """A task of lm-evaluation-harness (Gao and others, 2021): context, question and choices are its prompt, verbatim.

    The context ends with the passage that an item brings, if it is in the prompt, or else with the examples before the
    question. Items come in the order of the data, whatever the seed. An answer has a score by every metric that is a
    mean over items and higher when better, and by every filter: `exact_match,strict-match`. The first of them counts.
    Another process that the task is sent to makes it anew, from the name and settings of `source`.
    """

    def __init__(self, name: str, task: Any, source: tuple[str, TaskSettings]) -> None:
        _check_kind(name, task)
        self.name = name
        self._task, self._source = task, source
        # With this metric the task would also ask about every choice without a prompt.
        getattr(task, "_metric_fn_list", {}).pop("acc_mutual_info", None)
        higher = task.higher_is_better()
        self._metrics = [
            metric
            for metric, aggregation in task.aggregation().items()
            if aggregation is mean and higher.get(metric, True) and metric not in ("acc_mutual_info", "bypass")
        ]
        if not self._metrics:
            every = ", ".join(task.aggregation()) or "nothing"
            raise KeepsetError(
                f"{name} is measured by {every}: none is a mean over items that is higher when better, so it cannot be "
                "compared item by item; leave it out."
            )
        self.metric = f"{self._metrics[0]},{task._filters[0].name}"
        options = normalize_gen_kwargs(task.config.generation_kwargs or {})
        self.generation = Generation(options["max_gen_toks"], tuple(text for text in options["until"] if text))
        self.decodes = task.OUTPUT_TYPE == "generate_until" and self.generation.tokens >= _LONG

    def __reduce__(self) -> tuple[Any, ...]:
        # Its functions come from files that another process would not find, and its data may be large.
        return _made, (self.name, *self._source, self.generation)

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        self._task.set_fewshot_seed(_SEED)
        with loading(self.name), _prepared():
            return [self._example(*item) for item in itertools.islice(self._task.doc_iterator(), limit)]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        replies = [reply] if isinstance(reply, str) else reply
        instances = [Instance("", question.target, (), index, resps=[answer]) for index, answer in enumerate(replies)]
        figures: dict[str, float] = {}
        for ensemble in self._task._filters:
            ensemble.apply(instances)
            answered = [instance.filtered_resps[ensemble.name] for instance in instances]
            scores = self._task.process_results(question.target, answered)
            figures |= {f"{key},{ensemble.name}": float(scores[key]) for key in self._metrics if key in scores}
        if self.metric not in figures or not all(0 <= score <= 1 for score in figures.values()):
            wrong = ", ".join(f"{key} of {score:g}" for key, score in figures.items()) or "nothing"
            raise KeepsetError(f"{self.name} scores an answer with {wrong}: {self.metric} must be from 0 to 1.")
        return figures

    def _example(self, index: int, doc: Any) -> Example:
        task = self._task
        prefix = task.doc_to_prefix(doc) or ""
        prompt = task.fewshot_context(doc, num_fewshot=task.config.num_fewshot or 0, gen_prefix=prefix)
        built = task.construct_requests(
            doc=doc, ctx=prompt, metadata=(self.name, index, 1), apply_chat_template=False, chat_template=None
        )
        instances = built if isinstance(built, list) else [built]
        kinds = {instance.request_type for instance in instances}
        if len(kinds) > 1 or any(instance.args[0] != prompt for instance in instances):
            raise KeepsetError(
                f"{self.name} asks for the answers to several prompts at once, as where choices stand inside the "
                "prompt: leave it out."
            )
        context, text = _split(prompt.removesuffix(prefix), task.doc_to_text(doc), doc)
        choices = () if kinds == {"generate_until"} else tuple(instance.args[1] for instance in instances)
        return Example(str(index), context, (Question(text, target=doc, prefix=prefix, choices=choices),))


@functools.cache
def _made(task_name: str, name: str, settings: TaskSettings, generation: Generation) -> Task:
    original = next(task for task in _every(name, settings) if task.name == task_name)
    task = HarnessTask(task_name, original._task, (name, settings))
    task.generation = generation
    return task


_every = functools.cache(make)


def _check_kind(name: str, task: Any) -> None:
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        reason = "scores a text from its first token on, so there is no prompt to compress"
    elif getattr(task, "MULTIMODAL", False):
        reason = "asks about images or sounds, and only text can be evaluated"
    elif getattr(task, "UNSAFE_CODE", False):
        reason = "runs code that the model writes, which is not safe here"
    elif task.config.repeats > 1:
        reason = f"asks for {task.config.repeats} answers to every question, and one is evaluated"
    else:
        return
    raise KeepsetError(f"{name} {reason}: leave it out.")


def _split(prompt: str, question: str, doc: Any) -> tuple[str, str]:
    """Return context and question of a prompt; the question begins with the white space between the two.

    Args:
        prompt: the prompt, without the beginning of the answer.
        question: the item's question.
        doc: the item.
    """
    end = start = max(prompt.rfind(question), 0) if question else 0
    # If an item has no field `question`, its input is the question.
    fields = (*_DOCUMENTS, "input") if "question" in doc else _DOCUMENTS
    for passage in (doc[field].strip() for field in fields if isinstance(doc.get(field), str)):
        at = prompt.find(passage, start)
        if passage and at >= 0 and prompt[at + len(passage) :].strip():
            end = max(end, at + len(passage))
    context = prompt[:end].rstrip()
    return context, prompt[len(context) :]


@functools.cache
def _manager(data: Path | None) -> TaskManager:
    """Return the harness's tasks, with a folder's data; kept, because it reads thousands of files."""
    manager = TaskManager()
    if data is not None:
        manager._factory = _Factory(data)
    return manager


def _is_file(name: str) -> bool:
    return name.endswith(".yaml") and Path(name).is_file()


class _Factory(TaskFactory):
    """Makes tasks with a folder's data, whether named directly, in a group or by a tag."""

    def __init__(self, data: Path) -> None:
        super().__init__()
        self._data = data

    def _load_full_config(self, entry: Entry, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        config: dict[str, Any] = super()._load_full_config(entry, overrides)
        if not (self._data / f"{entry.name}.jsonl").is_file():
            return config
        if entry.kind is Kind.PY_TASK:
            raise KeepsetError(
                f"{entry.name} is a program that finds its data by itself: take {entry.name}.jsonl out of the folder."
            )
        return config | _from_folder(self._data, entry.name, config)


def _from_folder(data: Path, name: str, config: dict[str, Any]) -> dict[str, Any]:
    files = {"test": name}
    shots: str | None = config.get("fewshot_split") or config.get("training_split") or config.get("validation_split")
    if "samples" in (config.get("fewshot_config") or {}):
        shots = None
    elif (data / f"{name}.{shots}.jsonl").is_file():
        files["shots"] = f"{name}.{shots}"
        shots = "shots"
    else:
        # If both are one split, the harness leaves an item out of its own examples.
        shots = "test"
    return {
        # The harness's own JSON loader would turn texts that look like dates into dates.
        "custom_dataset": functools.partial(_read, data, files),
        **dict.fromkeys(("dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split")),
        "test_split": "test",
        "fewshot_split": shots,
    }


def _read(data: Path, files: dict[str, str], **_: Any) -> Any:
    """Return a data set for every split, whose items all have the fields of the first one."""
    splits = {}
    for split, name in files.items():
        items = read_records(data, name)
        for item in items:
            if missing := items[0].fields.keys() - item.fields.keys():
                item.first(*sorted(missing))
        splits[split] = import_extra("datasets").Dataset.from_list([dict(item.fields) for item in items])
    return splits


@contextmanager
def _prepared() -> Iterator[None]:
    """Seed tasks that shuffle like the harness's own command line, and hide its advice to their authors."""
    datasets = import_extra("datasets")
    level, bars = _log.level, not datasets.are_progress_bars_disabled()
    _log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with seeded(0, 1234):
            yield
    finally:
        _log.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
