"""Pages of the documentation that are made of other files of the repository, so that nothing is written twice."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
MADE_OF = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "examples.md": "examples/README.md",
    "tests.md": "tests/README.md",
}
PAGE_OF = {source: page for page, source in MADE_OF.items()} | {"benchmarks": "benchmarks.md"}
LINK = re.compile(r"(?<=\]\()([\w./-]+)((?:#[\w.-]+)?)(?=\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie elsewhere."""
    for page, source in MADE_OF.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text + (_programs() if page == "examples.md" else "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links to pages, and shows each method's docstring behind its formula."""
    name = page.file.src_uri
    if name == "index.md":
        page.meta["hide"] = ["navigation"]
    folder = posixpath.dirname(MADE_OF.get(name, f"docs/{name}"))
    if name == "methods.md":
        shown = _methods()
        sections = re.split(r"^(?=##)", markdown + "\n", flags=re.M)
        markdown = "".join(part + shown.get(part.split("`")[1], "") if part[:3] == "###" else part for part in sections)
    here = posixpath.dirname(name) or "."
    return LINK.sub(
        lambda link: posixpath.relpath(_page(posixpath.normpath(posixpath.join(folder, link[1]))), here) + link[2],
        markdown,
    )


def on_page_content(html: str, **_: Any) -> str:
    """Formulas are MathML, which browsers draw by themselves."""
    return FORMULA.sub(lambda formula: _mathml(formula[2], "inline" if formula[1] == "span" else "block"), html)


def _page(path: str) -> str:
    """Where a file of the repository is shown."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path not in PAGE_OF:
        return "examples.md#" + Path(path).stem
    return PAGE_OF.get(path, path)


def _methods() -> dict[str, str]:
    """What each method says of itself, by its name: parameters with their defaults, and its docstring."""
    shown = {}
    for path in [*(ROOT / "keepset/methods").glob("*.py"), *(ROOT / "keepset/allocators").glob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            lines = node.body if isinstance(node, ast.ClassDef) else []
            plain = {ast.unparse(line.targets[0]): line.value for line in lines if isinstance(line, ast.Assign)}
            if "name" not in plain:
                continue
            name = ast.literal_eval(plain["name"])
            fields = {line.target: line.value for line in lines if isinstance(line, ast.AnnAssign)}
            defaults = [
                f"{ast.unparse(field)}={ast.unparse(value.args[0])}"
                for field, value in fields.items()
                if isinstance(value, ast.Call) and ast.unparse(value.func) == "parameter"
            ]
            where = ".".join([*path.relative_to(ROOT).with_suffix("").parts, node.name])
            options = "{members: false, show_root_heading: false, show_root_toc_entry: false, show_bases: false}"
            call = f"{name}({', '.join(defaults)})"
            if len(call) > 100:
                call = f"{name}(\n    " + ",\n    ".join(defaults) + ",\n)"
            shown[name] = f"```python\n{call}\n```\n\n::: {where}\n    options: {options}\n\n"
    return shown


def _programs() -> str:
    """The examples themselves."""
    parts = []
    for path in sorted((ROOT / "examples").rglob("*.py")):
        parts.append(f"## {path.name} {{#{path.stem}}}\n\n```python\n{path.read_text(encoding='utf-8')}```\n")
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        parts.append(f"## {path.name} {{#{path.stem}}}\n")
        parts += [_cell(cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    return "\n" + "\n".join(parts)


def _cell(cell: dict[str, Any]) -> str:
    """A notebook's cell and what it printed."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return re.sub("^#+ (.*)", r"**\1**", text) + "\n"
    shown = [f"```python\n{text}\n```\n"]
    for output in cell["outputs"]:
        shown.append("".join(output.get("data", {}).get("text/html", [])) + "\n")
        if "text" in output:
            shown.append("```text\n" + "".join(output["text"]) + "```\n")
    return "\n".join(shown)


def _mathml(formula: str, display: str) -> str:
    return convert(unescape(formula), display=display)
