"""`keepset templates`: what a conversation goes on with under chat templates, counted by hand on small ones."""

import json
from pathlib import Path

import pytest

from tests.lab.cli.conftest import Run

TURN = "<i>{{ message['role'] }} {{ message['content'] }}<e>"
PLAIN = "{% for message in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<i>assistant {% endif %}"
# The system message stands before the newest message, wherever that is.
WANDERING = (
    "{% for message in messages[1:] %}{% if loop.last %}{{ messages[0]['content'] }} {% endif %}"
    + TURN
    + "{% endfor %}{% if add_generation_prompt %}<i>assistant {% endif %}"
)
# Each turn changes the first word of all.
COUNTING = "{{ messages|length }} messages " + PLAIN
TEMPLATES = {"plain": PLAIN, "wandering": WANDERING, "counting": COUNTING, "failing": "{{ raise_exception('no') }}"}


def entries(run: Run, *files: str) -> dict[str, dict[str, object]]:
    done = run("templates", *files, "--json", "out")
    assert done.code == 0
    return {entry.pop("template"): entry for entry in json.loads(Path("out").read_text())}


def test_says_what_goes_on_what_is_computed_again_and_what_is_dropped(run: Run, tmp_path: Path) -> None:
    Path("some").mkdir()
    for name, text in TEMPLATES.items():
        Path("some", f"{name}.jinja").write_text(text)
    found = entries(run, "some")
    assert found["failing"] == dict.fromkeys(("goes_on", "computed_again", "dropped", "system"))
    assert found["plain"]["goes_on"] is found["plain"]["system"] is True and found["plain"]["dropped"] == 0
    assert 0 < found["plain"]["computed_again"] < 0.15  # the marks around the newest message
    assert found["counting"]["goes_on"] is False and found["counting"]["computed_again"] > 0.8
    # The system message is dropped with each turn, and computed again.
    assert found["wandering"]["goes_on"] is True and found["wandering"]["dropped"] > 0.1
    assert found["wandering"]["computed_again"] > found["plain"]["computed_again"] + 0.1
    assert "A conversation goes on under 2 of 4." in run("templates", "some").out


def test_templates_of_a_tokenizers_configuration(run: Run, tmp_path: Path) -> None:
    Path("model").mkdir()
    file = Path("model", "tokenizer_config.json")
    file.write_text(json.dumps({"chat_template": [{"name": "tools", "template": PLAIN}]}))
    assert list(entries(run, "model")) == ["model tools"]
    file.write_text(json.dumps({"chat_template": PLAIN}))
    assert list(entries(run, str(file))) == ["model"]


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "has no chat template"), ("[", "cannot be read"), (None, "No such file")]
)
def test_files_without_a_template_are_a_sentence(run: Run, text: str | None, said: str) -> None:
    if text is not None:
        Path("tokenizer_config.json").write_text(text)
    done = run("templates", "tokenizer_config.json")
    assert done.code == 2 and said in done.err
