"""README's picture: a text around a fact that is asked for later, each token shaded by what three recipes
keep of it with a tenth of the bytes.

`python benchmarks/picture.py docs/kept.svg` runs the embedded model and writes it; what the recipes answer, and with
how many bytes, is measured.
"""

import argparse
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import shorten, wrap

import torch
from rich.cells import cell_len

import keepset
from keepset.lab.texts import NEEDLE, chat_parts, essay, insert, token_texts

RECIPES = ("snapkv(bytes=0.1)", "reread(bytes=0.1)", "quantized(match(pool(distilled)), bytes=0.1)")
CHARACTERS, AROUND, COLUMNS, ANSWER = 4200, 400, 44, 16
WIDE, HIGH, MARGIN, GAP = 7.2, 21, 20, 28
DARKEST = 0.4  # the share of heads from which on a token has the darkest shade
STYLE = """
svg { --page: #fff; --ink: #1b1f24; --muted: #59636e; --line: #d8dee4; --keep: #6fb0f0; --fact: #b3261e; }
@media (prefers-color-scheme: dark) {
  svg { --page: #14171b; --ink: #e6e9ec; --muted: #9ba6b2; --line: #343b43; --keep: #1f62b5; --fact: #ff8a80; }
}
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink); }
.head { font-weight: 700; }
.note { fill: var(--muted); }
.page { fill: var(--page); stroke: var(--line); }
.kept { fill: var(--keep); }
.fact { stroke: var(--fact); stroke-width: 2; }
"""


def measured(model, tokenizer, recipe: str, text: str) -> tuple[list[str | None], list[float], str, str]:
    """Return the context's tokens, the share of heads that keep each, the bytes in words, and the answer."""
    context, rest = chat_parts(tokenizer, text, NEEDLE.question)
    ids, question = (
        tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids for part in (context, rest)
    )
    cache = keepset.Cache(model, recipe)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
        held = f"{cache.share:.0%} of the bytes; asked later, it says:"
        answer = model.generate(**cache.ask(question), max_new_tokens=ANSWER, do_sample=False)
    shares = cache.keep_set.mask(ids.shape[1])[:, 0].float().mean((0, 1)).tolist()
    said = tokenizer.decode(answer[0, question.shape[1] :], skip_special_tokens=True).strip()
    return token_texts(tokenizer, ids[0].tolist()), shares, held, said


def lines_of(tokens: list[str | None], shares: list[float]) -> list[list[tuple[str, float]]]:
    """Return pieces of the text around the fact, each with its share, in lines wrapped at words."""
    marked: list[tuple[str, float]] = []
    for text, share in zip(tokens, shares, strict=True):
        if text is None:
            marked[-1] = (marked[-1][0], min(marked[-1][1], share))
        else:
            marked += [(character, share) for character in text]
    whole = "".join(character for character, _ in marked)
    middle = whole.index(NEEDLE.answer)
    first = whole.rindex(" ", 0, middle - AROUND) + 1
    marked = [
        (" " if c.isspace() else c, share)
        for c, share in marked[first : middle + AROUND]
        if c.isprintable() or c == "\n"
    ]
    lines, at = [], 0
    for line in wrap("".join(c for c, _ in marked), COLUMNS, drop_whitespace=False, replace_whitespace=False):
        lines.append(marked[at : at + len(line)])
        at += len(line)
    return lines[:-1]


def panel(left: float, recipe: str, lines: list[list[tuple[str, float]]], held: str, answer: str) -> list[str]:
    """One recipe: its name, the shaded text, and the answer."""
    parts = [
        f'<text x="{left}" y="{MARGIN + 12}" class="head">{escape(recipe)}</text>',
        f'<text x="{left}" y="{MARGIN + 30}" class="note">{held}</text>',
        f'<text x="{left}" y="{MARGIN + 48}">{escape(shorten(answer, COLUMNS, placeholder=" ..."))}</text>',
    ]
    top = MARGIN + 60
    for number, line in enumerate(lines):
        x, y = left, top + number * HIGH
        text = "".join(c for c, _ in line)
        begin = text.find(NEEDLE.answer)
        for share, run in groupby(line, key=lambda each: each[1]):
            wide = WIDE * cell_len("".join(character for character, _ in run))
            if share > 0:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide + 0.2:.1f}" height="{HIGH - 3}" class="kept" '
                    f'opacity="{min(1, share / DARKEST):.2f}"/>'
                )
            x += wide
        parts.append(
            f'<text x="{left}" y="{y + 13}" textLength="{x - left:.1f}" xml:space="preserve">{escape(text)}</text>'
        )
        if begin >= 0:
            from_x, to_x = (left + WIDE * cell_len(text[:end]) for end in (begin, begin + len(NEEDLE.answer)))
            parts.append(f'<path d="M{from_x:.1f} {y + 17}H{to_x:.1f}" class="fact"/>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    model, tokenizer = keepset.models.load()
    text = insert(essay()[:CHARACTERS], NEEDLE, 0.5)
    parts: list[str] = []
    described, rows = [], 0
    for number, recipe in enumerate(RECIPES):
        tokens, shares, held, answer = measured(model, tokenizer, recipe, text)
        lines = lines_of(tokens, shares)
        rows = max(rows, len(lines))
        parts += panel(MARGIN + number * (COLUMNS * WIDE + GAP), recipe, lines, held, answer)
        described.append(f"With {recipe} the model answers: {answer}")
    panels = len(RECIPES)
    width, height = 2 * MARGIN + panels * COLUMNS * WIDE + (panels - 1) * GAP, 2 * MARGIN + 60 + rows * HIGH
    title = f"A text with a fact in it, shaded by the share of heads that keep each token. {' '.join(described)}"
    parser.parse_args().file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8" class="page"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
