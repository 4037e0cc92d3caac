"""LongBench (Bai et al. 2023, arXiv:2308.14508): its English tasks and those on code."""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from keepset.bench.tasks.catalogue import Settings
from keepset.bench.tasks.data import DataRecord, extra, own_records
from keepset.bench.tasks.task import Example, Generation, Question, Reply, Task, Tokenizer
from keepset.errors import KeepsetError

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
"""The authors' kinds of tasks."""
NAMES = (*(name for names in PARTS.values() for name in names), _GROUP)

_FIRST_LINE = ("trec", "triviaqa", "samsum")
_VERBATIM = (*_FIRST_LINE, "lcc", "repobench-p")
_CONTEXT = "{{context}}"


def make(name: str, settings: Settings) -> list[Task]:
    """The task; `longbench` is all sixteen."""
    names = NAMES[:-1] if name == _GROUP else [name]
    return [LongBenchTask(one, settings) for one in names]


class LongBenchTask(Task):
    """One of LongBench's tasks, with the prompt and the metric of lm-evaluation-harness.

    Where prompts are a few examples, the answer is its first line that is not empty, as in the authors' program; the
    harness ends it at the first line break, even if nothing came before. These and code are asked without a chat
    template, as there.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self._data_set = name.removeprefix(f"{_GROUP}_")
        self.chat = self._data_set not in _VERBATIM
        self._folder = settings.data
        self._config = _config(self._data_set)
        self.metric = self._config["metric_list"][-1]["metric"]
        self.generation = Generation(self._config["generation_kwargs"]["max_gen_toks"])

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """From the folder's `qasper.jsonl`, as the authors' archive has it; where there is none, from the hub."""
        items = own_records(self._folder, self._data_set) or _download(self._config)
        return [self._example(index, item) for index, item in enumerate(items[:limit])]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """The best score of all right answers."""
        answer = str(reply)
        if self._data_set in _FIRST_LINE:
            answer = answer.lstrip("\n").split("\n")[0]
        module, _, function = self._config["process_results"].rpartition(".")
        scores = getattr(extra(f"lm_eval.tasks.longbench.{module}"), function)(question.target, [answer])
        return {self.metric: float(scores[self.metric])}

    def _example(self, index: int, row: DataRecord) -> Example:
        render = extra("lm_eval.utils").apply_template
        fields = {"question": row.first("question", "input")}
        before, _, after = self._config["doc_to_text"].partition(_CONTEXT)
        answers = row.first("answers")
        target = {"answers": answers, "all_classes": row.fields.get("all_classes")}
        question = Question(render(after, fields), target=target)
        try:
            right = isinstance(answers, list) and all(self.judge(question, answer) for answer in answers)
        except (TypeError, AttributeError, IndexError):
            right = False
        if not right or not answers:
            raise KeepsetError(f"{row.where} has answers that {self.name} cannot judge by: take the official file.")
        return Example(str(row.fields.get("_id", index)), render(before, fields) + row.first("context"), (question,))


def _config(data_set: str) -> dict[str, Any]:
    """The harness's definition; what names a function of its is the name."""
    yaml, harness = extra("yaml"), importlib.util.find_spec("lm_eval")
    if harness is None or harness.origin is None:
        raise KeepsetError('LongBench needs lm-evaluation-harness: run `pip install "keepset[eval]"`.')
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda _, node: node.value)
    path = Path(harness.origin).parent / "tasks" / _GROUP / f"{data_set}.yaml"
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def _download(config: dict[str, Any]) -> list[DataRecord]:
    from keepset.bench.tasks.hub import loading

    name = config["dataset_name"]
    with loading(name):
        items: Iterable[Any] = extra("datasets").load_dataset(config["dataset_path"], name, split=config["test_split"])
    return [DataRecord(f"{name}, row {number},", dict(fields)) for number, fields in enumerate(items, 1)]
