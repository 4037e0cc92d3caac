"""A whole task of lm-evaluation-harness: the mean over cells is the score that the harness reports of its own model."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from keepset.bench.candidate import candidates
from keepset.bench.sweep.runner import Runner
from keepset.bench.tasks.find import find
from keepset.bench.tasks.task import TaskSettings
from keepset.recipe import Recipe
from tests.bench.harness import WITH_HARNESS
from tests.bench.sweep.letters import letters
from tests.hf.models import tiny

pytestmark = pytest.mark.full

TEXTS = ["What is kept?", "Some entries; ", "Of two heads, which one looks at the first token?", "A", "12 \n"]
MEAN = {"aggregation": "mean", "higher_is_better": True}
KINDS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_target": "{{said}}",
        "gen_prefix": "So",
        "generation_kwargs": {"until": [".", "e"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", **MEAN}],
    },
}


def define(folder: Path, said: list[str]) -> dict[str, str]:
    """The paths of both tasks, whose right answers are these."""
    items = [
        {"text": text, "choices": [" it", " a longer answer", "?"], "label": index % 3, "said": said[index]}
        for index, text in enumerate(TEXTS)
    ]
    folder.mkdir()
    folder.joinpath("items.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    files = {"data_files": {"test": str(folder / "items.jsonl")}, "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "doc_to_text": "{{text}}"}
    paths = {name: folder / f"{name}.yaml" for name in KINDS}
    for name, path in paths.items():
        path.write_text(json.dumps({"task": name, **common, **KINDS[name]}), encoding="utf-8")  # JSON is YAML
    return {name: str(path) for name, path in paths.items()}


@WITH_HARNESS
def test_cells_of_a_task_have_the_harness_s_answers_and_its_scores(tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = tiny("llama"), letters()

    def harness(folder: Path) -> Any:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        own = HFLM(model, tokenizer=tokenizer, batch_size=1)
        return simple_evaluate(own, tasks=list(KINDS), task_manager=manager, bootstrap_iters=0, log_samples=True)

    define(tmp_path / "first", ["?"] * len(TEXTS))
    samples = sorted(harness(tmp_path / "first")["samples"]["write"], key=lambda sample: sample["doc_id"])
    said = [sample["resps"][0][0] for sample in samples]
    assert len(set(said)) > 2
    paths = define(tmp_path / "second", [*said[:3], "wrong", "wrong"])
    results = harness(tmp_path / "second")["results"]
    assert results["write"]["exact_match,none"] == 0.6

    todo = candidates(Recipe.parse_list("snapkv(keep=1.0), adakv(expected_attention, keep=1.0)"), [])
    runner = Runner(model, tokenizer, mode="prompt", chat=False)
    for name, path in paths.items():
        [task] = find([path], TaskSettings())
        examples = task.examples(tokenizer)
        rows = [list(runner.run(task, example, todo, seed=0)) for example in examples]
        for cells in zip(*rows, strict=True):
            outcomes = [cell for cell in cells if cell.error is None]
            assert len(outcomes) == len(TEXTS)
            for key in outcomes[0].scores:
                assert fmean(outcome.scores[key] for outcome in outcomes) == results[name][key]
            if name == "write":
                assert [outcome.replies for outcome in outcomes] == [[answer] for answer in said]
