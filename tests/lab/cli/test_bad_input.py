"""Bad input is one sentence on standard error and exit code 2, and nothing else happens."""

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import keepset
from keepset import Budget, KeepsetError, models
from keepset.core.observation import Observation
from keepset.core.tables import save, say_neutral
from keepset.lab.cli.checks import parse_budgets, parse_whole
from keepset.lab.sweep.store import Store
from keepset.methods.keys import Knorm
from tests.core.test_tables import random_tables
from tests.hf.models import statistics
from tests.lab.cli.conftest import Run, check_refused

COMPARE = ("compare", "--text", "text", "--prompt-tokens", "200", "--continuation", "16")
PLACE = "cannot be written: give a file in a folder that exists"
NO_PLACE = "is no place for a file"
ASK = "context ask words"
BUILD = "context build --out saved"
COMPILE = "compile --out a"

OUT_OF_RANGE = """generate Hello --output-tokens 0
bench latency --prompt-tokens 0
bench latency --rounds 0
bench latency --output-tokens 0
compare --continuation -1
compare --decode --every 0
compare --decode --generate 0
calibrate --out a --length 3
calibrate --out a --gate-steps -1
compile --out a --sample 0
reproduce ams-table-2 --limit 0
ui --port 70000
eval needle --temperature -1.0"""
SEEDED = ("generate Hello", "calibrate --out a", COMPILE, "reproduce ams-table-2", "tune --text text")
READING = ("compare", "generate Hello", "calibrate --out a", COMPILE, "tune", BUILD)

REFUSED = [
    *((words, f"{' '.join(words.split()[-2:])} is out of range") for words in OUT_OF_RANGE.splitlines()),
    *((f"{words} --seed -1", "--seed -1 is out of range") for words in SEEDED),
    ("eval needle --seeds -1", "--seed -1 is out of range"),
    *(
        (f"{words} --temperature {value}", f"--temperature {value} is out of range")
        for words, values in (("generate Hello", ("-1.0", "nan", "1e-30", "inf")), (f"{ASK} Why?", ("-1.0",)))
        for value in values
    ),
    *((f"{words} --text absent", "'absent' cannot be read (No such file or directory)") for words in READING),
    *((f"{words} --text empty", "'empty' is empty") for words in READING),
    *((f"compare {option}", PLACE) for option in ("--html absent/page.html", "--html ''", "--json folder")),
    ("demo --html absent/page.html", PLACE),
    ("bench latency --json absent/a", PLACE),
    ("eval needle --out missing/sweep.jsonl", PLACE),
    *((f"{words} --out {path}", NO_PLACE) for words in ("calibrate", "compile") for path in (".", "absent/a")),
    ("context build --text text --out .", NO_PLACE),
    ("compare --budgets=0.5,0", "keep=0 is out of range"),
    ("compare --recipes 'tova(keep=1.5)'", "keep=1.5 is out of range: use a fraction in (0, 1]"),
    ("compare --recipes 'match(match(tova), keep=0.5)'", "match is there twice: leave one of them out"),
    ("compare --recipes snapvk", "There is no method 'snapvk'; did you mean 'snapkv'? There are: adakv, "),
    ("""compare --recipes "tova(keep=f'\x1b[31m')" """, "is not a plain value"),
    ("""compare --recipes "tova\n(\nkeep='\n')" """, "keep="),
    ("compare --prompt-tokens 0", "--prompt-tokens 0 is out of range: use an integer from 1"),
    ("compare --text text --question Why?", "give both --question and --answer"),
    ("compare --text text --answer So.", "give both --question and --answer"),
    ("compare --text text --question ' ' --answer So.", "--question is empty"),
    ("compare --text text --question Why? --answer ''", "--answer is empty"),
    ("compare --text text --question Why\udcff? --answer So.", "--question is not UTF-8"),
    ("compare --question Why? --answer So.", "give it with --text"),
    ("compare --every 8", "give --decode too"),
    ("compare --generate 8", "give --decode too"),
    ("compare --decode --budgets 128,0.25", "--budgets 0.25 is a share of what is left, which would shrink"),
    ("compare --decode --generate 8 --continuation 16", "give one of them"),
    ("compare --decode --text text --question Why? --answer So.", "leave --question and --answer out"),
    ("compare --json pipe", "'pipe' cannot be written (it is no regular file)"),
    ("generate ' \n\t'", "The prompt is empty"),
    ("generate \udcff", "The prompt is not UTF-8"),
    ("generate Hello --recipe tova", "does not say how much to keep: write tova(bytes=0.25)"),
    (f"generate Hello --seed {'9' * 30}", "is out of range: use a whole number from 0"),
    ("bench latency --prompt-tokens a", "--prompt-tokens 'a' is no list of whole numbers"),
    ("bench latency --recipes snapkv", "does not say how much to keep"),
    ("calibrate --out a --tokens 15", "--tokens 15 is out of range: use a whole number from 16"),
    ("calibrate --out text", "'text' exists: name another file with --out, or replace it with --force"),
    ("calibrate --out model/a", "is in a model's folder"),
    ("compile", "Give either --out, the file to write, or --show"),
    ("compile --out a --show b", "Give either --out, the file to write, or --show"),
    ("compile --show absent", "There is no file 'absent' with tables"),
    ("compile --show text", "'text' is no file of CompilerKV's tables"),
    (f"{COMPILE} --continuation 1", "--continuation 1 is out of range: use a whole number from 2"),
    (f"{COMPILE} --budgets 128,a", "--budgets '128,a' is no list of whole numbers"),
    (f"{COMPILE} --budgets 64", "A budget of 64 leaves nothing to decide"),
    (f"{COMPILE} --prompt-tokens 512", "A budget of 512 leaves nothing to decide"),
    (f"{COMPILE} --recipe snapkv", "--recipe 'snapkv' is not compilerkv"),
    (f"{COMPILE} --recipe 'compilerkv(keep=70)'", "and give budgets by --budgets"),
    (f"""{COMPILE} --recipe "compilerkv(tables='b')" """, "has tables already: leave tables= out"),
    (f"{COMPILE} --weights 1,b", "--weights '1,b' is no list of numbers"),
    (f"{COMPILE} --weights 1", "Weights 1 are no choice"),
    (f"{COMPILE} --text bad.jsonl", "Line 2 of 'bad.jsonl' is no JSON object"),
    (f"{BUILD} --text text --recipe tova", "does not say how much to keep"),
    ("context ask absent Why?", "There is no file 'absent'"),
    ("context ask foreign Why?", "'foreign' is no saved context"),
    ("context ask words Why?", "no saved context"),
    (f"{ASK} ' \n'", "The question is empty"),
    (f"{ASK} \udcff", "The question is not UTF-8"),
    ("eval needle --limit 0", "--limit 0 is out of range: use an integer from 1."),
    ("eval gsm8k --every -1", "--every -1 is out of range: use an integer from 0."),
    ("eval gsm8k --output-tokens 0", "--output-tokens 0 is out of range: use an integer from 1."),
    ("eval gsm8k --limit 1 --sample 1", "--limit takes the first examples and --sample random ones"),
    *((f"eval gsm8k --sample {word}", f"--sample '{word}' is neither a share") for word in ("0", "1.5", "nan", "all")),
    ("eval needle --every 8", "--every is for tasks that decode, such as gsm8k, and none of these does"),
    ("eval needle --seeds 0,x", "--seeds '0,x' is no list of whole numbers: write them as 1,2,3."),
    *(
        (f"eval needle --always={text}", f"--always {text!r} is not two numbers of tokens, the first and the newest")
        for text in ("", "4", "4,", "4,32,1", "-4,32", "4,x", "4,1234567890")
    ),
    ("eval needle --prompt-tokens ''", "--prompt-tokens '' is no list of whole numbers"),
    ("eval needle --prompt-tokens 0", "are no lengths in tokens"),
    ("eval needle --budgets half", "The budget 'half' is not a number"),
    ("eval needle --budgets 30%", "The budget '30%' is not a number; did you mean 0.3? Use a share"),
    ("eval needle --budgets 30.0", "is out of range; did you mean bytes=0.3? Use a share"),
    ("generate Hello --recipe snapkv(bytes=25)", "is out of range; did you mean bytes=0.25? Use a share"),
    ("eval needle --recipes snapvk", "There is no method 'snapvk'; did you mean 'snapkv'?"),
    ("eval needle --recipes ''", "is no list of recipes"),
    ("eval needle --data missing", "There is no folder 'missing' to take data from"),
    ("eval needle --out bad.jsonl", "is damaged, or no file of `keepset eval`"),
    ("eval ,", "There is no task to evaluate"),
    ("eval gsm8k --budgets 0.5", "gsm8k is about decoding, where a share of what is left would shrink"),
    ("methods snapvk", "There is no method 'snapvk'; did you mean 'snapkv'? There are: "),
    ("reproduce ams-table-99", "There is no table or figure 'ams-table-99'"),
    ("reproduce ams-table-2 --out text", "'text' is no folder to write to"),
    ("reproduce ams-table-2 --prompt-tokens x", "--prompt-tokens 'x' is no list"),
    ("results absent.jsonl", "There is no file 'absent.jsonl'"),
    ("results text", "'text' is damaged, or no file of `keepset eval`"),
    ("results empty.jsonl", "'empty.jsonl' has no figures yet"),
    ("results empty.jsonl --csv absent/a.csv", "'absent/a.csv' cannot be written"),
    ("results empty.jsonl --csv ./empty.jsonl", "name different files"),
    ("results empty.jsonl --csv a --html a", "name different files"),
    ("tune --text text --budget half", "The budget 'half' is not a number"),
    ("tune --text text --budget 0.5,0.25", "--budget '0.5,0.25' has several values"),
    ("tune --text text --text ./text", "is given twice"),
    *(
        (f"{command} {'n' * 5000}", "The name of a file or folder is longer than this system allows")
        for command in ("compare --html", "eval needle --out", "calibrate --out", "serve")
    ),
]


@pytest.fixture(scope="module")
def empty_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "empty.jsonl"
    with Store.begin(path, "model", {}):
        pass
    return path


@pytest.fixture
def files(tmp_path: Path, text: Path, empty_sweep: Path) -> None:
    """What the words name; nothing else is there."""
    (tmp_path / "model").mkdir()
    bad = '{"text": "a"}\n{'
    for name, content in (("empty", " \n"), ("words", "words"), ("bad.jsonl", bad), ("model/config.json", "")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    safetensors.torch.save_file({"weight": torch.zeros(3)}, tmp_path / "foreign")
    shutil.copyfile(empty_sweep, tmp_path / "empty.jsonl")


@pytest.mark.usefixtures("unloaded", "files")
@pytest.mark.parametrize(("words", "because"), REFUSED)
def test_refused_before_a_model_is_loaded(run: Run, words: str, because: str) -> None:
    check_refused(run, *shlex.split(words), because=because)


@pytest.mark.usefixtures("files")
def test_models_that_are_none(run: Run) -> None:
    check_refused(
        run, "compare", "--model", "./absent", because="'./absent' is neither an existing folder nor the name"
    )
    check_refused(run, "generate", "Hello", "--model", "folder", because="The folder 'folder' has no config.json")
    check_refused(run, "context", "ask", "foreign", "Why?", "--model", "folder", because="'foreign' is no saved")
    check_refused(run, "tune", "--text", "text", "--model", "model", because="The model 'model' cannot be loaded")


@pytest.mark.usefixtures("tiny", "text")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        ("compare --text short", "tokens, too few for a prompt and 64 tokens of continuation"),
        ("compare --text text --prompt-tokens 4000", "do not fit the model's context of 2048: ask for fewer tokens"),
        ("compare --prompt-tokens 10", "10 tokens of prompt leave no room for the text"),
        (
            "compare --decode --text text --prompt-tokens 100 --generate 5000",
            "100 tokens of prompt and 5012 after it do not fit the model's context of 2048",
        ),
        ("generate Hello --text long", "do not fit the model's context of 2048: give a shorter text"),
        ("generate Hello --recipe 'knorm(keep=8)' --question When?", "knorm is not aware of a task"),
        ("context build --text long --out saved", "do not fit the model's context of 2048: give a shorter text."),
        ("bench latency --prompt-tokens 1500 --text text", "fewer than 1500: give a longer --text"),
        ("bench latency --prompt-tokens 4000", "do not fit the model's context of 2048"),
        ("calibrate --out a --length 4096", "is more than the model's context of 2048"),
        ("compile --out a --text text", "No text has 1072 tokens"),
        ("compile --out a --text text --prompt-tokens 2048", "48 new ones do not fit the model's context of 2048"),
        ("eval needle --prompt-tokens 99999999", "needle@99999999 does not fit the model's context of 2048 tokens"),
        ("tune --text text --budget 240", "keep=240 leaves nothing to choose of pieces of 240 tokens"),
        ("tune --text text --budget 1.0", "bytes=1.0 leaves nothing to choose of pieces of 240 tokens"),
        ("tune --text short", "too few for 16 pieces of 256: give one of 496 tokens or more, or several"),
        ("reproduce ams-table-2 --model embedded --data data", "gsm8k.jsonl, line 1, is not a JSON object"),
    ],
)
def test_refused_by_the_model_and_its_text(run: Run, words: str, because: str) -> None:
    Path("short").write_text("Short.", encoding="utf-8")
    Path("long").write_text("word " * 3000, encoding="utf-8")
    Path("data").mkdir()
    Path("data", "gsm8k.jsonl").write_text("{", encoding="utf-8")
    check_refused(run, *shlex.split(words), because=because)


@pytest.mark.usefixtures("tiny", "text")
def test_files_of_another_model(run: Run) -> None:
    save(random_tables(7, 5), Path("tables"))
    measured = f"snapkv(keep=0.5), adakv(qfilter(stats={str(statistics('llama_mqa'))!r}), keep=0.5)"
    compiled = "compilerkv(tables='tables', window=8, keep=20)"
    for words in ((*COMPARE, "--recipes"), ("bench", "latency", "--recipes"), ("eval", "needle", "--recipes")):
        check_refused(run, *words, measured, because="are of another model: theirs has 2 layers with 1 KV heads")
    for words in ((*COMPARE, "--recipes"), ("generate", "Hello", "--recipe")):
        check_refused(run, *words, compiled, because="theirs has 7 layers of 5 query heads, this one 2 of 4")


@pytest.mark.usefixtures("tiny", "text")
def test_scores_that_are_nan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of finite logits: the recipe's row fails, others are there, and what is written is JSON."""
    score = Knorm.score

    def half_nan(method: Knorm, observation: Observation) -> Any:
        scores = score(method, observation).clone()
        scores[..., ::2] = float("nan")
        return scores

    monkeypatch.setattr(Knorm, "score", half_nan)
    sentence = "Scores of layer 0 are NaN, so nothing says what to keep"
    done = run(*COMPARE, "--recipes", "knorm(keep=0.5), tova(keep=0.5)", "--json", "figures")
    assert done.code == 1 and f"knorm(keep=0.5): {sentence}" in " ".join(done.out.split())
    rows = json.loads(Path("figures").read_text())["rows"]
    assert sentence in rows[0]["error"] and "kl" not in rows[0] and rows[1]["kl"] > 0
    done = run("generate", "Hello, who is there?", "--recipe", "adakv(knorm, keep=8)")
    assert done.code == 2 and sentence in done.err
    # Whoever serves a request wants an answer, though one number overflowed: NaN is the worst of scores there.
    model, tokenizer = models.load()
    cache = keepset.Cache(model, "knorm(keep=8)")
    model(**tokenizer("Hello, who is there in the hall?", return_tensors="pt"), past_key_values=cache)
    assert cache.keep_set is not None


def test_weights_that_are_no_numbers(run: Run, tiny: Any, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = tiny[0].model.layers[0].mlp.up_proj.weight.data
    number = weight[0, 0].item()
    weight[0, 0] = float("nan")
    of_text = ("--text", "text", "--prompt-tokens", "100", "--continuation", "8", "--recipes", "knorm(keep=0.5)")
    commands = (
        ("generate", "Hello", "--recipe", "knorm(keep=0.5)"),
        ("compare", *of_text),
        ("compare", "--decode", *of_text, "--json", "-"),
        ("context", "build", "--text", "text", "--out", "saved"),
    )
    try:
        for words in commands:
            done = run(*words)
            assert done.code == 2 and "The model predicts NaN: its weights are damaged" in done.err
            assert "nan" not in done.out.lower() and not Path("saved").exists()
    finally:
        weight[0, 0] = number


@pytest.mark.usefixtures("tiny")
def test_warnings_are_sentences(run: Run) -> None:
    say_neutral.cache_clear()
    done = run("generate", "Hello, who is there?", "--recipe", "compilerkv(window=4, keep=8)", "--output-tokens", "1")
    assert done.code == 0 and "\ncompilerkv has no tables: all heads count the same" in f"\n{done.err}"
    assert "Warning" not in done.err and ".py" not in done.err


@pytest.mark.full
@pytest.mark.usefixtures("tiny")
def test_a_hub_out_of_reach_leaves_nothing_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    check_refused(run, "eval", "gsm8k", "--limit", "1", because="gsm8k")


@pytest.mark.parametrize(
    "words",
    ["compare --prompt-tokens many", "eval gsm8k --mode aware", "comprae", "generate", "tune", "bench latency --x"],
)
def test_words_that_are_no_command(run: Run, words: str) -> None:
    done = run(*words.split())
    assert (done.code, done.out) == (2, "")
    assert "Usage: " in done.err and "Traceback" not in done.err


# --- lists of numbers


def test_each_number_once() -> None:
    assert parse_whole("3, 5,3,-1", "seeds") == [3, 5, -1]
    assert parse_budgets("512, 0.25,1.0,1") == [Budget(512), Budget(bytes=0.25), Budget(bytes=1.0), Budget(1)]


@pytest.mark.parametrize(
    "budget", ["0", "-3", "0.0", "-0.5", "1.5", "1e999", "nan", "half", "True", "1j", "", "0.5 0.2"]
)
def test_what_is_no_budget(budget: str) -> None:
    with pytest.raises(KeepsetError, match=r"is out of range|is not a number"):
        parse_budgets(f"0.5,{budget}")
    with pytest.raises(KeepsetError, match="is too large a number"):
        parse_budgets("9" * 20)
