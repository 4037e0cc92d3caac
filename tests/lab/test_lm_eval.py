"""lm-evaluation-harness under a recipe, held against the harness's own model and against one token at a time."""

import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import keepset
from keepset import KeepsetError
from tests.hf.models import tiny
from tests.lab.sweep.asked import letters, watched
from tests.lab.tasks.scaffold import WITH_HARNESS

pytestmark = WITH_HARNESS

CONTEXTS = ["What is kept of a long text?", "A", "Some entries; ", "Of two heads, which one looks at the first token?"]
CHOICES = [[" it", " a longer answer", "?"], ["b", "c", "d"], ["x", "yes", "no, none of them"], ["both", "none", "AA"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are letters, so that texts say all that there is."""
    path = str(tmp_path_factory.mktemp("model"))
    tiny("llama").save_pretrained(path)
    letters().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of four items each, and one of perplexity."""
    path = tmp_path_factory.mktemp("tasks")
    items = [
        {"text": text, "choices": choices, "label": index % 3}
        for index, (text, choices) in enumerate(zip(CONTEXTS, CHOICES, strict=True))
    ]
    path.joinpath("items.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    files = {"data_files": str(path / "items.jsonl"), "cache_dir": str(path / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "train", "doc_to_text": "{{text}}"}
    mean = {"aggregation": "mean", "higher_is_better": True}
    chosen = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}", "target_delimiter": ""}
    generated = {"doc_to_target": "{{choices[0]}}", "generation_kwargs": {"until": ["."], "max_gen_toks": 12}}
    own = {
        "choose": ("multiple_choice", {**chosen, "metric_list": [{"metric": "acc", **mean}]}),
        "write": ("generate_until", {**generated, "metric_list": [{"metric": "exact_match", **mean}]}),
        "perplexity": (
            "loglikelihood_rolling",
            {"doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}]},
        ),
    }
    for name, (kind, task) in own.items():
        text = json.dumps({"task": name, "output_type": kind, **common, **task})  # JSON is YAML
        path.joinpath(f"{name}.yaml").write_text(text, encoding="utf-8")
    return path


def keepset_lm(*arguments: Any, **options: Any) -> Any:
    from keepset.lab.lm_eval import KeepsetLM

    return KeepsetLM(*arguments, **options)


def hf_lm(*arguments: Any, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(*arguments, **options)


def evaluate(model: Any, tasks: Path, *names: str) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, log_samples=True)


def answers(results: Any, task: str) -> list[Any]:
    return [sample["resps"] for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])]


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, index) for index, pair in enumerate(arguments)]


@cache
def harness_says(folder: str, tasks: Path, batch_size: int) -> Any:
    return evaluate(hf_lm(folder, device="cpu", batch_size=batch_size), tasks, "choose", "write")


PAIRS = [
    (context, choice)
    for context, choices in zip(["", *CONTEXTS], [["A", "abc"], *CHOICES], strict=True)
    for choice in choices
]


@pytest.mark.few(1)
@pytest.mark.cross
@pytest.mark.parametrize("batch_size", [3, 1])
@pytest.mark.parametrize("recipe", ["snapkv(keep=1.0)", "adakv(expected_attention, keep=1.0)"])
def test_with_everything_kept_it_says_what_the_harness_says(
    folder: str, tasks: Path, batch_size: int, recipe: str
) -> None:
    own = harness_says(folder, tasks, batch_size)
    ours = evaluate(keepset_lm(folder, recipe, device="cpu", batch_size=batch_size), tasks, "choose", "write")
    assert ours["results"] == own["results"]
    assert answers(ours, "write") == answers(own, "write")
    assert len({str(answer) for answer in answers(own, "write")}) == 4
    for mine, theirs in zip(answers(ours, "choose"), answers(own, "choose"), strict=True):
        assert [one[0][1] for one in mine] == [one[0][1] for one in theirs]
        assert [one[0][0] for one in mine] == pytest.approx([one[0][0] for one in theirs], abs=1e-4)


@pytest.mark.parametrize("max_length", [None, 17])
def test_texts_that_are_empty_or_too_long(
    folder: str, max_length: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = dict(device="cpu", batch_size=2, max_length=max_length)
    own, ours = hf_lm(folder, **options), keepset_lm(folder, "snapkv(keep=1.0)", **options)
    [said] = own.generate_until(requests("generate_until", (CONTEXTS[0], {"max_gen_toks": 5, "until": []})))
    asked = requests("loglikelihood", *PAIRS, (CONTEXTS[0], said), *PAIRS[:2])
    theirs = own.loglikelihood(asked)
    caplog.clear()
    mine = ours.loglikelihood(asked)
    assert ("contexts are cut from the left" in caplog.text) == (max_length is not None)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
    assert [score for score, _ in mine] == pytest.approx([score for score, _ in theirs], abs=1e-4)
    assert max_length or (mine[len(PAIRS)][1] and not mine[2][1])


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "lfm2"])
def test_models_with_other_layers(folder: str, architecture: str) -> None:
    options: dict[str, Any] = dict(tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=3)
    written = requests("generate_until", *((context, {"max_gen_toks": 8, "until": []}) for context in CONTEXTS))
    asked = requests("loglikelihood", *PAIRS)
    own, ours = hf_lm(tiny(architecture), **options), keepset_lm(tiny(architecture), "snapkv(keep=1.0)", **options)
    theirs, mine = own.loglikelihood(asked), ours.loglikelihood(asked)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
    assert [score for score, _ in mine] == pytest.approx([score for score, _ in theirs], abs=1e-4)
    assert ours.generate_until(written) == own.generate_until(written)


@torch.no_grad()
def naive(model: Any, recipe: str, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """A cache for every continuation, which is fed token by token."""
    cache = keepset.Cache(model, recipe)
    total, greedy, said = 0.0, True, context
    for token in continuation:
        logits = model(torch.tensor([said]), past_key_values=cache).logits[0, -1].double()
        total += float(logits[token] - logits.logsumexp(0))
        greedy = greedy and int(logits.argmax()) == token
        said = [token]
    return total, greedy


@pytest.mark.few(1)
@pytest.mark.cross
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("recipe", ["snapkv(keep=0.25, recent=1)", "adakv(knorm, keep=0.25)", "tova(keep=6, every=4)"])
def test_continuations_are_scored_as_if_each_were_decoded_alone(folder: str, batch_size: int, recipe: str) -> None:
    lm = keepset_lm(folder, recipe, device="cpu", batch_size=batch_size)
    found = lm.loglikelihood(requests("loglikelihood", *PAIRS))
    ids = lm.tokenizer.convert_tokens_to_ids
    expected = []
    for context, text in PAIRS:
        start = context.rstrip()
        said = ids([*context[len(start) :], *text])
        expected.append(naive(lm.model, recipe, ids(list(start) or ["<bos>"]), said))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    everything = hf_lm(folder, device="cpu").loglikelihood(requests("loglikelihood", *PAIRS))
    assert max(abs(one[0] - two[0]) for one, two in zip(found, everything, strict=True)) > 0.1


def test_a_batch_of_prompts_generates_what_each_does_alone(folder: str) -> None:
    recipe, options = "snapkv(keep=0.25, recent=4)", {"max_gen_toks": 10, "until": []}
    asked = requests("generate_until", *((context, options) for context in CONTEXTS))
    lm = keepset_lm(folder, recipe, device="cpu", batch_size=3)
    found = lm.generate_until(asked)
    for context, text in zip(CONTEXTS, found, strict=True):
        inputs = lm.tokenizer(context, return_tensors="pt", return_token_type_ids=False)
        cache = keepset.Cache(lm.model, recipe)
        said = lm.model.generate(**inputs, past_key_values=cache, max_new_tokens=10, do_sample=False)
        assert text == lm.tokenizer.decode(said[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert found != hf_lm(folder, device="cpu").generate_until(asked)


@pytest.mark.parametrize("batch_size, after", [(1, [(1, 2), (1, 15)]), (2, [(2, 15)]), (3, [(3, 15)])])
def test_a_context_is_prefilled_once(folder: str, batch_size: int, after: list[tuple[int, int]]) -> None:
    lm = keepset_lm(folder, "snapkv(keep=0.5)", device="cpu", batch_size=batch_size)
    with watched(lm.model) as calls:
        lm.loglikelihood(requests("loglikelihood", *((CONTEXTS[0], choice) for choice in CHOICES[0])))
    assert calls == [(1, len(CONTEXTS[0])), *after]


def test_a_score_that_no_recipe_changes_is_told(folder: str, caplog: pytest.LogCaptureFixture, tasks: Path) -> None:
    asked = requests("loglikelihood", (CONTEXTS[0], "A"), (CONTEXTS[0], "B"), (CONTEXTS[0], "AB"))
    scores = [
        keepset_lm(folder, f"snapkv(keep={keep}, recent=1)", device="cpu").loglikelihood(asked) for keep in (0.25, 1.0)
    ]
    assert scores[0][:2] == scores[1][:2] and scores[0][2] != scores[1][2]
    assert "2 of 3 continuations are one token" in caplog.text
    caplog.clear()
    keepset_lm(folder, "snapkv(keep=1.0)", device="cpu").loglikelihood(asked[2:])
    assert "one token" not in caplog.text
    with pytest.raises(KeepsetError, match="no prompt to compress: leave out tasks"):
        evaluate(keepset_lm(folder, "snapkv(keep=0.5)", device="cpu"), tasks, "perplexity")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"recipe": "snapkv(keep=0.5)"}, "There is no model to evaluate: write --model_args pretrained=FOLDER"),
        ({"pretrained": "FOLDER"}, "There is no recipe to evaluate: write --model_args"),
        ({"pretrained": "FOLDER", "recipe": "snapkv"}, r"does not say how much to keep: write snapkv\(bytes=0.25\)"),
        ({"pretrained": "FOLDER", "recipe": 3}, "'3' is not a recipe"),
        ({"pretrained": "no/where/at/all", "recipe": "snapkv(keep=0.5)"}, "'no/where/at/all' cannot be loaded"),
        ({"pretrained": "FOLDER", "recipe": "snapkv(keep=0.5)", "keeps": 1}, "cannot be loaded .*keeps"),
        ({"pretrained": "FOLDER", "recipe": "snapkv(keep=0.5)", "batch_size": "auto"}, "batch_size=auto is not a numb"),
        ({"pretrained": "FOLDER", "recipe": "snapkv(keep=0.5)", "batch_size": 0}, "batch_size=0 is not a number"),
        ({"pretrained": "FOLDER", "recipe": "h2o(keep=64, every=8)"}, "looks at the attention of the whole prompt"),
    ],
)
def test_bad_arguments_are_one_sentence(folder: str, arguments: dict[str, Any], sentence: str) -> None:
    if arguments.get("pretrained") == "FOLDER":
        arguments = {**arguments, "pretrained": folder}
    with pytest.raises(KeepsetError, match=sentence) as caught:
        keepset_lm(**arguments, **({"device": "cpu"} if "pretrained" in arguments else {}))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.full
def test_on_the_command_line(
    folder: str, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    from keepset.lab.lm_eval import main

    # Reading the harness's thousands of own tasks takes seconds.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))

    def run(recipe: str) -> None:
        where = ["--model", "keepset", "--tasks", "choose", "--include_path", str(tasks), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["keepset", *where, "--model_args", f"pretrained={folder},recipe={recipe}"])
        main()

    run("adakv(snapkv, keep=0.25)")
    assert "|choose|" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        run("adakv(snapkw, keep=0.25)")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("keepset: There is no method 'snapkw'; did you mean")
