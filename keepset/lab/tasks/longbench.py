"""LongBench (Bai et al. 2023, arXiv:2308.14508): its English tasks and those on code.

Prompts and metrics are read from lm-evaluation-harness. Its tasks themselves cannot be used: they load their data as
soon as they are named, do not know the fields of the authors' files, and are cut at another place before the question.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from keepset.errors import KeepsetError, installation
from keepset.lab.tasks.data import DataRecord, HubData, import_extra, load_records
from keepset.lab.tasks.find import harness_folder
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

_GROUP = "longbench"
_DOMAINS = {
    "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-document QA": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
PARTS = {domain: tuple(f"{_GROUP}_{data_set}" for data_set in data_sets) for domain, data_sets in _DOMAINS.items()}
"""Tasks by the authors' kinds."""
NAMES = (*(name for names in PARTS.values() for name in names), _GROUP)

_FIRST_LINE = ("trec", "triviaqa", "samsum")
_VERBATIM = (*_FIRST_LINE, "lcc", "repobench-p")
_CONTEXT = "{{context}}"


def make(name: str, settings: TaskSettings) -> list[Task]:
    """Return the tasks of a name.

    Args:
        name: a task, or `longbench` for all sixteen.
        settings: the settings, which may name a user's folder.
    """
    names = NAMES[:-1] if name == _GROUP else [name]
    return [LongBenchTask(task_name, settings) for task_name in names]


class LongBenchTask(Task):
    """One of LongBench's tasks, with the prompt and the metric of lm-evaluation-harness.

    The answer to a few-shot prompt is its first line that is not empty, as in the authors' program. The harness ends it
    at the first line break, even if nothing came before. Few-shot prompts and code are asked without a chat template,
    as in the authors' program.
    """

    def __init__(self, name: str, settings: TaskSettings) -> None:
        self.name = name
        self._data_set = name.removeprefix(f"{_GROUP}_")
        self.chat = self._data_set not in _VERBATIM
        self._folder = settings.data
        self._config = _harness_config(self._data_set)
        self.metric = self._config["metric_list"][-1]["metric"]
        self.generation = Generation(self._config["generation_kwargs"]["max_gen_toks"])

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """Return the items of the authors' file in the folder, such as `qasper.jsonl`, else those of the hub."""
        hub = HubData(self._config["dataset_path"], self._config["dataset_name"], self._config["test_split"])
        items = load_records(self._data_set, self._folder, hub)
        return [self._example(index, item) for index, item in enumerate(items[:limit])]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """Return the best score that any of the right answers gives."""
        answer = str(reply)
        if self._data_set in _FIRST_LINE:
            answer = answer.lstrip("\n").split("\n")[0]
        module, _, function = self._config["process_results"].rpartition(".")
        metrics = import_extra(f"lm_eval.tasks.longbench.{module}", "lm-eval[longbench]")
        scores = getattr(metrics, function)(question.target, [answer])
        return {self.metric: float(scores[self.metric])}

    def _example(self, index: int, item: DataRecord) -> Example:
        render = import_extra("lm_eval.utils").apply_template
        fields = {"question": item.first("question", "input")}
        before, _, after = self._config["doc_to_text"].partition(_CONTEXT)
        answers = item.first("answers")
        target = {"answers": answers, "all_classes": item.fields.get("all_classes")}
        question = Question(render(after, fields), target=target)
        try:
            right = isinstance(answers, list) and all(self.judge(question, answer) for answer in answers)
        except (TypeError, AttributeError, IndexError):
            right = False
        if not right or not answers:
            raise KeepsetError(f"{item.where} has answers that {self.name} cannot judge by: take the official file.")
        context = render(before, fields) + item.first("context")
        return Example(str(item.fields.get("_id", index)), context, (question,))


def _harness_config(data_set: str) -> dict[str, Any]:
    """Return the harness's definition of a task, with functions as their names."""
    if (folder := harness_folder()) is None:
        raise KeepsetError(f"LongBench needs lm-evaluation-harness: run {installation('eval')}.")
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda _, node: node.value)
    return yaml.load((folder / _GROUP / f"{data_set}.yaml").read_text(encoding="utf-8"), loader)
