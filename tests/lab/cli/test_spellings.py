"""Words that users of other programs bring along."""

import pytest
from typer.main import get_command

from keepset import __version__
from keepset.lab.cli import app
from tests.lab.cli.conftest import Run


def test_help_and_version_in_other_words(run: Run) -> None:
    assert run("-V") == run("--version")
    assert __version__ in run("-V").out
    assert run("help") == run("--help") == run("-h")
    assert run("help", "generate") == run("generate", "--help")
    assert run("help", "context", "ask") == run("context", "ask", "-h")
    assert "No such command 'nothing'" in run("help", "nothing").err


@pytest.mark.parametrize("name", ["generate", "chat", "eval", "reproduce", "context ask", "bench latency"])
def test_new_tokens_are_output_tokens(name: str) -> None:
    command = get_command(app)
    for word in name.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    (option,) = (option for option in command.params if "--output-tokens" in option.opts)
    assert "--max-new-tokens" in option.opts and option.name == "output_tokens"


def test_a_shell_completes_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"COMP_WORDS": "keepset ge", "COMP_CWORD": "1", "_KEEPSET_COMPLETE": "complete_bash"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        get_command(app).main([], prog_name="keepset")
    assert capsys.readouterr().out.split() == ["generate"]
