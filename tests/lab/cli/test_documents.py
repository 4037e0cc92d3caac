"""Commands and recipes in README and the documents are such, and README's run."""

import importlib.util
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.main import get_command

import keepset
from keepset import METHODS, Recipe, defaults, models
from keepset.core import statistics
from keepset.lab import latency, tune
from keepset.lab.cli import app
from keepset.lab.cli.streaming import Sampling
from keepset.lab.compare import text_task
from keepset.lab.texts import essay
from tests.lab.cli.conftest import Run, tiny_model

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]

# A line of code may go on after a backslash.
COMMAND = re.compile(r"^ {4,}(keepset (?:.*\\\n)*.*)$", re.M)
QUOTED = re.compile(r"`((\w+)\([^`]*\))`")


KEEPSET: Any = get_command(app)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def commands(document: Path) -> list[list[str]]:
    """The words of every command in it that begins a line of code, without comments."""
    return [shlex.split(line.replace("\\\n", " "), comments=True) for line in COMMAND.findall(text_of(document))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_are_known_and_so_are_their_options(document: Path) -> None:
    for words in commands(document):
        command, rest = KEEPSET, words[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        context = command.make_context(words[0], rest)
        assert command.context_settings.get("ignore_unknown_options") or not context.args, words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_recipes_can_be_read(document: Path) -> None:
    for text, name in QUOTED.findall(text_of(document)):
        if name in METHODS and not re.search(r"\.\.\.|scorer|recipe", text):
            Recipe.parse(text)


@pytest.mark.full
def test_readmes_commands_run_as_they_stand(run: Run, embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, as some go on with what others wrote; all but those that become servers."""
    model = tiny_model(layers=1)
    # As long, and with the embedded model's tokenizer beside it.
    for name in ("max_position_embeddings", "name_or_path"):
        setattr(model.config, name, getattr(embedded[0].config, name))
    monkeypatch.setattr(models, "load", lambda *_: (model, embedded[1]))
    # Those of the embedded model have another shape.
    monkeypatch.setattr(statistics, "_offers", {})
    monkeypatch.setattr(statistics, "offer", lambda *_: None)
    # Of recipes, of tune's rounds and of an answer's tokens the least: the commands are what is tried.
    monkeypatch.setattr(defaults, "COMPARED", ("random",))
    monkeypatch.setattr(Sampling, "options", property(lambda self: {"do_sample": False, "max_new_tokens": 3}))
    monkeypatch.setattr(tune, "PIECES", 2)
    monkeypatch.setattr(text_task, "ANSWER_TOKENS", 2)
    monkeypatch.setattr(latency, "latency", partial(_briefly, latency.latency))
    Path("report.txt").write_text(essay()[:3000] + " The contract ends on 31 March.", encoding="utf-8")
    shown = commands(README)
    assert len(shown) > 8
    for words in shown:
        if words[1] not in ("serve", "ui"):
            done = run(*words[1:])
            assert done.code == 0, (words, done.err)
    written = {"report.html", "report.safetensors", "sweep.jsonl", "sweep.html"}
    assert {path.name for path in Path().iterdir()} >= written


def _briefly(measure: Any, model: Any, prompts: Any, recipes: Any, tokens: int, rounds: int) -> Any:
    assert (tokens, rounds) == (64, 3)
    return measure(model, prompts, recipes, 4, 1)


def test_every_method_has_its_row_and_its_formula() -> None:
    methods = text_of(ROOT / "docs" / "methods.md")
    rows = re.findall(r"^\| `(\w+)(?:\(\w+\))?` \|", methods, flags=re.M)
    sections = re.findall(r"^### `(\w+)`\n\n\S", methods, flags=re.M)
    assert (
        sorted(rows)
        == sorted(sections)
        == sorted(kind.name for kind in METHODS.values() if "keepset" in kind.__module__)
    )


PRESSES = """
AdaKV Block CAM Cap Chunk ChunkKV Compactor Composed CompressionRatioDecoding CriticalAdaKV CriticalKV CUR DMS
Decoding DuoAttention EntropyGatedChunkKV ExpectedAttention ExpectedAttentionStats FastKVzip Finch KeyDiff
KeyRerotation Knorm KVCompose KVgrad KVzap KVzip LagKV LeverageScore LUKV Merging NonCausalAttn
ObservedAttention PerLayerCompression PrefillDecoding PyramidKV QFilter Random RestoreKV SimLayerKV SnapKV
StreamingLLM ThinK TOVA
"""
"""Those that kvpress 0.5.5 exports, its two base classes apart."""


def test_users_of_kvpress_find_every_press_and_its_numbers() -> None:
    page = text_of(ROOT / "docs" / "coming_from.md")
    assert set(re.findall(r"`(\w+)Press\b", page)) - {"Base", "Scorer"} == set(PRESSES.split())
    shown = re.findall(r"^\| `(\w+Press\(.*)` \| `(.*?)` \|", page, flags=re.M)
    assert len(shown) > 20
    for press, recipe in shown:
        Recipe.parse(recipe)
        numbers = [sorted(map(float, re.findall(r"=(\d[\d.]*)", text))) for text in (press, recipe)]
        assert numbers[0] == numbers[1] or "..." in press, press


def test_users_of_other_programs_find_commands_that_are_known() -> None:
    page = text_of(ROOT / "docs" / "coming_from.md")
    shown = [shlex.split(words) for words in re.findall(r"`keepset (eval [a-z][^`]*)`", page)]
    assert len(shown) > 1
    for words in shown:
        KEEPSET.commands["eval"].make_context("eval", words[1:])
    options = {option for parameter in KEEPSET.commands["eval"].params for option in parameter.opts}
    ours = re.findall(r"^\|.*\|(.*)\|$", sections(ROOT / "docs" / "coming_from.md")["lm-eval"], flags=re.M)
    named = set(re.findall(r"(?<=[` ])--[a-z][a-z-]*", " ".join(ours)))
    assert len(named) > 5 and named <= options


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: keepset\.(\w+)$", text_of(ROOT / "docs" / "api.md"), flags=re.M)
    assert {*shown, "KeepsetError"} >= set(keepset.__all__)


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.stem)
def test_files_that_are_named_exist(document: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.py)(?: \w+)?`", text_of(document)):
        assert (ROOT / name).exists() or (ROOT / "keepset" / name).exists(), name


# --- figures

COMMANDS = re.compile(r"`(?:python )?(benchmarks/\w+\.py)|`keepset (\w+)")
FIGURE = re.compile(r"(?<![\w=.])\d+\.\d+(?![\w])")


def sections(document: Path) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", text_of(document), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


RESULTS = sections(ROOT / "docs" / "results.md")
CONCLUSIONS = "What to take from it"
MEASURED = {name: text for name, text in RESULTS.items() if name != CONCLUSIONS and rows(text)}
WITHOUT_TABLES = RESULTS.keys() - MEASURED.keys() - {CONCLUSIONS}


@pytest.mark.parametrize("section", MEASURED)
def test_every_table_of_results_is_made_by_a_command_that_is_named(section: str) -> None:
    named = COMMANDS.findall(RESULTS[section])
    assert named, section
    for script, command in named:
        assert (ROOT / script).is_file() if script else command in KEEPSET.commands


def test_a_section_without_a_table_has_no_figures() -> None:
    for section in WITHOUT_TABLES:
        assert not FIGURE.findall(RESULTS[section]), section


def test_the_conclusions_figures_stand_in_those_tables() -> None:
    tables, concluded = rows("".join(MEASURED.values())), rows(RESULTS[CONCLUSIONS])
    intervals = re.findall(r"\d+\.\d+\]?(?:\([^)]*\))? \([\d.]+\)", concluded)
    assert len(intervals) > 8
    for found in intervals:
        assert re.sub(r"\](\([^)]*\))?", "", found) in tables, found
    assert not set(FIGURE.findall(concluded)) - set(FIGURE.findall(tables))


@pytest.mark.parametrize("name", ["README.md", "docs/compatibility.md", "docs/gpu.md", "docs/serve.md"])
def test_what_has_not_run_on_a_gpu_stands_at_the_top(name: str) -> None:
    top = text_of(ROOT / name)[:600]
    assert re.search(r"\*\*[^*]*not (been )?run[^*]*\*\*|\*\*Nothing[^*]*run[^*]*GPU[^*]*\*\*", top, flags=re.I)


def test_no_document_installs_keepset_from_an_index() -> None:
    installs = re.findall(r"^ +pip install (.*)$", text_of(README), flags=re.M)
    assert installs[0].strip() == "."
    for document in [*DOCUMENTS, ROOT / "examples" / "README.md"]:
        assert not re.search(r"pip install keepset\b", text_of(document)), document


# --- concepts

CONCEPTS = ("KV head", "Entry", "Sink", "Budget", "Prefill and decode", "Event", "Method", "Allocator", "Page")


def test_each_concept_has_a_drawing_that_its_program_makes() -> None:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec is not None and spec.loader is not None
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    made = {drawing.name: str(drawing) for drawing in (make() for make in drawings.ALL)}
    concepts = sections(ROOT / "docs" / "concepts.md")
    assert tuple(concepts) == CONCEPTS
    shown = {re.findall(r"!\[[^]]+\]\(concepts/([\w-]+)\.svg\)", text)[0] for text in concepts.values()}
    assert shown == set(made)
    for name, svg in made.items():
        assert text_of(ROOT / "docs" / "concepts" / f"{name}.svg") == svg
        assert "prefers-color-scheme: dark" in svg and "<title>" in svg
        ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "name", ["README", *(f"docs/{name}" for name in ("guide", "methods", "evaluation", "engines", "gpu", "serve"))]
)
def test_terms_lead_to_the_concepts(name: str) -> None:
    anchors = {re.sub(r"\W+", "-", concept.lower()) for concept in CONCEPTS}
    linked = re.findall(r"concepts\.md#([\w-]+)", text_of(ROOT / f"{name}.md"))
    assert linked and set(linked) <= anchors
