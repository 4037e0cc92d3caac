"""`keepset templates`: how a conversation goes on under chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from keepset.errors import KeepsetError
from keepset.lab.cli.checks import check_writable
from keepset.lab.cli.console import output, say, show_table
from keepset.lab.cli.options import Json
from keepset.lab.report.table import Column, Table, yes

_WORDS = re.compile(r"<[^<>\s]*>|\w+|\s+|.", re.DOTALL)
"""What stands for tokens: templates differ in words and marks, whatever tokens these are."""
_SYSTEM = "Answer in whole sentences, and say so if you do not know something."
_TURNS = (
    ("Which rivers of Africa are longer than three thousand kilometres?", "The Nile, the Congo, the Niger and others."),
    (
        "Which of these end in the Atlantic Ocean, and where?",
        "The Congo and the Niger, south and north of the equator.",
    ),
    ("Which of these two carries more water on its way?", "The Congo carries more than any other river of Africa."),
)


def templates(
    files: Annotated[
        list[Path],
        Argument(
            metavar="FILE...",
            help="Templates (.jinja), tokenizer_config.json files, or folders with any of these.",
        ),
    ],
    json_file: Json = None,
) -> None:
    """Say of chat templates whether a conversation goes on under them.

    A chat of three turns is rendered with each, and compared as a server does it under a recipe with turns=True. Words
    and marks stand for tokens, so no model is needed. Some templates rewrite what was said: what they leave out is
    dropped, and from what they change on all is computed again.
    """
    check_writable(json_file)
    found = dict(_found(files))
    if not found:
        raise KeepsetError(f"{str(files[0])!r} has no chat template: give .jinja files, or a tokenizer_config.json.")
    entries = [{"template": name, **_tried(template)} for name, template in found.items()]
    output(entries, json_file, lambda: _print(entries))


def _print(entries: list[dict[str, Any]]) -> None:
    table = Table("template", _COLUMNS)
    for entry in entries:
        table.add(entry["template"], entry)
    show_table(table)
    going = sum(entry["goes_on"] is True for entry in entries)
    say(
        f"A conversation goes on under {going} of {len(entries)}. computed again: the share of the third prompt that "
        "is computed besides its new message; dropped: the share of what was said that the prompt does not go on with; "
        "system: whether protect='system' finds the system message. A template without figures does not render the "
        "chat."
    )


def _share(name: str) -> Any:
    return lambda entry: None if entry[name] is None else f"{entry[name]:.0%}"


_COLUMNS = [
    Column("goes on", lambda entry: entry["goes_on"], yes),
    Column("computed again", _share("computed_again")),
    Column("dropped", _share("dropped")),
    Column("system", lambda entry: entry["system"], yes),
]


def _found(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of templates."""
    for file in files:
        if file.is_dir():
            inside = [*sorted(file.glob("*.jinja")), file / "tokenizer_config.json"]
            yield from _found([path for path in inside if path.is_file()])
            continue
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix != ".json":
                yield file.stem, text
                continue
            said = json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            cause = getattr(error, "strerror", None) or "it is no JSON object of UTF-8"
            raise KeepsetError(f"{str(file)!r} cannot be read ({cause}): name another file.") from error
        several = said if isinstance(said, list) else [{"name": "", "template": said}] if said else []
        for each in several:
            yield f"{file.parent.name} {each['name']}".strip(), each["template"]


class _Words:
    """A tokenizer of words for one template."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._ids: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in _WORDS.findall(text)]

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        """Return the ids of a rendered conversation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            [conversation],
            chat_template=self._template,
            add_generation_prompt=options.get("add_generation_prompt", False),
            bos_token="<s>",
            eos_token="</s>",
        )
        return self.ids(rendered[0][0])


def _tried(template: str) -> dict[str, Any]:
    """Return how a chat goes on under a template; None where it does not render the chat."""
    from keepset.core.edits import Span, continuation_of
    from keepset.core.roles import system_span, user_mark

    words, history = _Words(template), [{"role": "system", "content": _SYSTEM}]
    ids: list[int] = []
    left_out: tuple[Span, ...] = ()
    newest, figures = 0, dict[str, Any](goes_on=None, computed_again=None, dropped=None, system=None)
    for asked, answered in _TURNS:
        history.append({"role": "user", "content": asked})
        try:
            prompt = words.apply_chat_template(history, add_generation_prompt=True)
        except Exception:  # a template is a program of others
            return dict.fromkeys(figures)
        found, said = continuation_of(ids, left_out, newest, prompt, 0), max(len(ids), 1)
        lost = len(ids) - found.tokens + sum(end - first for first, end in found.left_out)
        computed = max(len(prompt) - found.matched - len(words.ids(asked)), 0)
        figures |= {
            "goes_on": found.is_over and found.matched > len(prompt) / 2,
            "computed_again": computed / len(prompt),
            "dropped": lost / said,
        }
        left_out, newest = (*left_out, *found.left_out), len(prompt)
        ids = [*ids[: found.tokens], *prompt[found.matched :], *words.ids(answered)]
        history.append({"role": "assistant", "content": answered})
    try:
        figures["system"] = bool(system_span(prompt, user_mark(words)))
    except KeepsetError:
        figures["system"] = False
    return figures
