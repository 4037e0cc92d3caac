"""The drawings of docs/concepts.md: `python docs/drawings.py` writes them into docs/concepts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "concepts"
WIDTH, MARGIN, CELL, STEP = 720, 24, 22, 26
STYLE = """
svg { --page: #fff; --ink: #1b1f24; --muted: #59636e; --line: #d8dee4; --keep: #6fb0f0; --sink: #f2b36b; }
@media (prefers-color-scheme: dark) {
  svg { --page: #14171b; --ink: #e6e9ec; --muted: #9ba6b2; --line: #3d4650; --keep: #1f62b5; --sink: #a8621b; }
}
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.head { font-weight: 600; }
.note { fill: var(--muted); font-size: 13px; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.page { fill: var(--page); stroke: var(--line); }
.kept { fill: var(--keep); stroke: var(--keep); }
.sink { fill: var(--sink); stroke: var(--sink); }
.gone { fill: none; stroke: var(--muted); stroke-dasharray: 3 3; }
.held { fill: var(--line); stroke: var(--line); }
.frame { fill: none; stroke: var(--muted); }
.wire { fill: none; stroke: var(--muted); stroke-width: 1.5; }
.mark { fill: none; stroke: var(--ink); stroke-width: 2; }
"""


class Drawing:
    """The parts of one drawing, from top to bottom."""

    def __init__(self, name: str, title: str, height: int) -> None:
        self.name, self.title, self.height = name, title, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write words with their base line at `y`."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, wide: float, high: float, kind: str, radius: float = 4) -> None:
        """Draw a rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{radius:g}" class="{kind}"/>'
        )

    def path(self, d: str, kind: str = "wire") -> None:
        """Draw a line."""
        self.parts.append(f'<path d="{d}" class="{kind}"/>')

    def cells(self, x: float, y: float, kinds: Sequence[str], high: float = CELL, step: float = STEP) -> None:
        """Draw a row of entries, one for each kind; "" leaves a gap."""
        for at, kind in enumerate(kinds):
            if kind:
                self.box(x + at * step, y, step - (STEP - CELL), high, kind)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a straight arrow, which is horizontal or vertical."""
        down, right = to_y != y, to_x != x
        head = f"M{to_x - 5:g} {to_y - 6:g}L{to_x:g} {to_y:g}L{to_x + 5:g} {to_y - 6:g}" if down and not right else ""
        head = head or f"M{to_x - 6:g} {to_y - 5:g}L{to_x:g} {to_y:g}L{to_x - 6:g} {to_y + 5:g}"
        self.path(f"M{x:g} {y:g}L{to_x:g} {to_y:g}{head}")

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        frame = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" class="page"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n{frame}\n{body}\n</svg>\n"
        )


def kv_head() -> Drawing:
    """Six query heads of a layer share two KV heads."""
    drawing = Drawing("kv-head", "Six query heads of one layer. Three share a KV head, which has its own entries.", 228)
    drawing.text(MARGIN, 36, "One layer", "head")
    for head in range(6):
        y = 58 + head * 26
        drawing.box(MARGIN, y, 110, 20, "frame", 10)
        drawing.text(MARGIN + 55, y + 15, f"query head {head}", "note middle")
        middle = 84 + (head // 3) * 80
        drawing.path(f"M{MARGIN + 110} {y + 10}C{MARGIN + 160} {y + 10} {MARGIN + 160} {middle + 11} 222 {middle + 11}")
    for head in range(2):
        y = 84 + head * 80
        drawing.box(222, y - 10, 474, 42, "frame", 8)
        drawing.text(236, y + 16, f"KV head {head}", "head")
        drawing.cells(322, y, ["kept"] * 14)
    drawing.text(322, 148, "one entry for each token", "note")
    return drawing


def entry() -> Drawing:
    """An entry is what one KV head stores of one token."""
    drawing = Drawing(
        "entry",
        "Tokens of a text, and two KV heads with one entry for each. An entry is a key, a value and a position.",
        236,
    )
    tokens = ["Oslo", "'s", "secret", "number", "is", "48217", "."]
    for at, token in enumerate(tokens):
        drawing.text(150 + at * 66, 40, token, "middle")
    for head in range(2):
        y = 60 + head * 44
        drawing.text(MARGIN, y + 16, f"KV head {head}", "head")
        drawing.cells(123, y, ["sink" if head and at == 5 else "kept" for at in range(7)], step=66, high=24)
    drawing.path("M480 128V152")
    drawing.text(123, 172, "one entry =", "head")
    for x, wide, words in ((222, 150, "key: 64 numbers"), (382, 150, "value: 64 numbers"), (542, 154, "position: 5")):
        drawing.box(x, 152, wide, 30, "sink" if x < 542 else "frame")
        drawing.text(x + wide / 2, 172, words, "middle")
    drawing.text(123, 212, "Compression drops entries. Each KV head drops its own.", "note")
    return drawing


def sink() -> Drawing:
    """Attention of the newest token over the text: the first tokens receive most."""
    drawing = Drawing(
        "sink",
        "Bars of attention over a text. The first four tokens receive much, the newest some, those between little.",
        232,
    )
    heights = [112, 84, 58, 44, 8, 5, 12, 6, 4, 9, 5, 26, 7, 4, 6, 9, 5, 8, 14, 22, 34, 48]
    drawing.text(MARGIN, 36, "Attention that a new token pays to", "head")
    for at, high in enumerate(heights):
        kind = "sink" if at < 4 else "kept" if at >= 18 else "held"
        drawing.box(MARGIN + 14 + at * 30, 172 - high, 22, high, kind, 3)
    drawing.path(f"M{MARGIN} 172.5H696")
    drawing.text(MARGIN + 14, 194, "sinks: always looked at,", "note")
    drawing.text(MARGIN + 14, 212, "whatever they say", "note")
    drawing.text(370, 194, "most of the text", "note middle")
    drawing.text(696, 194, "recent: the newest tokens", "note end")
    return drawing


def budget() -> Drawing:
    """The same quarter of the bytes, as whole entries and as entries of 8 bits."""
    drawing = Drawing(
        "budget", "A full cache of 16 entries; a quarter of its bytes holds 4 entries of 16 bits or 7 of 8 bits.", 248
    )
    rows = (
        ("full cache, 16 bits", ["held"] * 16, 22, "16 entries, all bytes"),
        (
            "keep=0.25",
            ["kept", "gone", "gone", "kept", *["gone"] * 5, "kept", *["gone"] * 5, "kept"],
            22,
            "4 entries of 16 bits",
        ),
        (
            "bytes=0.25, 8 bits",
            [
                "kept",
                "gone",
                "kept",
                "kept",
                "gone",
                "gone",
                "kept",
                *["gone"] * 2,
                "kept",
                *["gone"] * 4,
                "kept",
                "kept",
            ],
            11,
            "7 entries of 8 bits",
        ),
    )
    for at, (name, kinds, high, note) in enumerate(rows):
        y = 34 + at * 54
        drawing.text(MARGIN, y + 16, name, "head")
        drawing.cells(182, y + (22 - high) / 2, kinds, high=high, step=23)
        drawing.text(696, y + 16, note, "note end")
    drawing.box(182, 198, 89, 22, "kept")
    drawing.box(274, 198, 273, 22, "gone")
    drawing.text(MARGIN, 214, "bytes of both", "head")
    drawing.text(696, 214, "about a quarter", "note end")
    return drawing


def prefill() -> Drawing:
    """A prompt is read at once and compressed at its end; the answer is decoded token by token."""
    drawing = Drawing(
        "prefill-and-decode",
        "The prompt runs in one pass, the prefill, and is compressed at its end. Decoding adds an entry a token.",
        246,
    )
    drawing.box(60, 34, 270, 34, "frame", 6)
    drawing.text(195, 56, "prompt: all tokens at once", "middle")
    for at in range(12):
        drawing.box(342 + at * 29, 34, 23, 34, "frame", 6)
    drawing.text(195, 90, "prefill", "head middle")
    drawing.text(516, 90, "decode: one token of the answer after another", "middle")
    drawing.path("M60 214V112M60 214H696")
    drawing.text(66, 122, "entries of a head", "note")
    drawing.path(
        "M60 212L330 128V190" + "".join(f"H{342 + at * 29}V{190 - at * 3}" for at in range(12)) + "H696", "mark"
    )
    drawing.path("M330 108V226", "gone")
    drawing.text(342, 132, "the prompt is compressed at its end", "note")
    drawing.text(690, 234, "tokens", "note end")
    return drawing


def event() -> Drawing:
    """With every=256 a head's entries rise to keep + every and fall to keep, again and again."""
    drawing = Drawing(
        "event",
        "Entries of a head over time under keep=512, every=256: they rise by 256 and fall to 512 at each event.",
        266,
    )
    drawing.text(MARGIN, 36, "snapkv(keep=512, every=256)", "head")
    drawing.path("M90 186V54M90 186H696")
    drawing.path("M90 128H696M90 84H696", "gone")
    drawing.text(82, 132, "512", "note end")
    drawing.text(82, 88, "768", "note end")
    line, x = "M90 128", 90
    for _ in range(4):
        x += 145
        line += f"L{x} 84V128"
    drawing.path(line + "L696 120", "mark")
    for at in range(4):
        drawing.text(90 + 145 * (at + 1), 76, "event", "note middle")
    drawing.text(696, 204, "tokens of the answer", "note end")
    drawing.text(MARGIN, 240, "event", "head")
    drawing.cells(116, 224, ["kept", "gone", "gone", "kept", "kept", "gone", "kept", "gone", "gone", "kept"])
    drawing.arrow(380, 235, 424, 235)
    drawing.cells(436, 224, ["kept"] * 5)
    drawing.text(576, 240, "packed, rest freed", "note")
    return drawing


def method() -> Drawing:
    """A method scores entries; the best stay."""
    drawing = Drawing("method", "Entries of a head, a score for each, and the four with the highest scores stay.", 236)
    scores = [70, 14, 8, 34, 10, 6, 58, 16, 9, 5, 22, 62]
    best = sorted(range(12), key=lambda at: -scores[at])[:4]
    drawing.text(MARGIN, 46, "Observation", "head")
    drawing.text(MARGIN, 64, "entries, queries", "note")
    drawing.cells(160, 36, ["held"] * 12, step=36)
    drawing.text(MARGIN, 132, "score", "head")
    drawing.text(MARGIN, 150, "worth of an entry", "note")
    for at, score in enumerate(scores):
        drawing.box(160 + at * 36, 160 - score, 32, score, "kept" if at in best else "held", 3)
    drawing.path("M160 160.5H588")
    drawing.text(MARGIN, 192, "KeepSet", "head")
    drawing.text(MARGIN, 210, "the best stay", "note")
    drawing.cells(160, 180, ["kept" if at in best else "gone" for at in range(12)], step=36)
    drawing.text(696, 188, "how many:", "note end")
    drawing.text(696, 206, "the budget", "note end")
    return drawing


def allocator() -> Drawing:
    """The same budget, even over the heads, and by what they need."""
    drawing = Drawing(
        "allocator", "Sixteen entries over four heads: four each, or seven, two, one and six by an allocator.", 226
    )
    for left, name, counts in (
        (MARGIN, "snapkv: each head the same", (4, 4, 4, 4)),
        (378, "adakv(snapkv): by need", (7, 2, 1, 6)),
    ):
        drawing.text(left, 38, name, "head")
        for head, count in enumerate(counts):
            y = 56 + head * 32
            drawing.text(left, y + 16, f"KV head {head}", "note")
            drawing.cells(left + 78, y, ["kept"] * count)
    drawing.text(MARGIN, 208, "16 entries on both sides", "note")
    return drawing


def page() -> Drawing:
    """Pages of a server before and after an event: what stays is packed, and whole pages go back."""
    drawing = Drawing(
        "page",
        "A request with five pages. After an event its entries fill two pages, and three go back to the pool.",
        236,
    )
    drawing.text(MARGIN, 48, "before", "head")
    drawing.text(MARGIN, 148, "after", "head")
    kept = {0, 3, 5, 9, 14, 16, 18, 19}
    for number in range(5):
        x = 136 + number * 112
        drawing.box(x, 28, 106, 34, "frame", 6)
        drawing.cells(x + 4, 34, ["kept" if number * 4 + at in kept else "held" for at in range(4)])
        drawing.text(x + 53, 82, f"page {number}", "note middle")
        stays = number >= 3
        drawing.box(x, 128, 106, 34, "frame" if stays else "gone", 6)
        if stays:
            drawing.cells(x + 4, 134, ["kept"] * 4)
        drawing.text(x + 53, 182, f"page {number}" if stays else "free", "note middle")
    drawing.arrow(416, 94, 416, 118)
    drawing.text(430, 112, "what stays is packed at the end", "note")
    drawing.text(136, 214, "Other requests get the free pages at once.", "note")
    return drawing


ALL = (kv_head, entry, sink, budget, prefill, event, method, allocator, page)


def main() -> None:
    """Write all drawings."""
    FOLDER.mkdir(exist_ok=True)
    for make in ALL:
        drawing = make()
        (FOLDER / f"{drawing.name}.svg").write_text(str(drawing), encoding="utf-8")


if __name__ == "__main__":
    main()
