"""Whether options are vLLM's, told at once: nothing here imports torch, or vLLM."""

import importlib.util
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from keepset.errors import KeepsetError

_OWN = ("--recipe", "--contexts", "--save-bytes")
_SOURCES = ("engine/arg_utils.py", "entrypoints/*/cli_args.py", "entrypoints/cli/serve.py")


def check_spelling(options: Sequence[str]) -> None:
    """Refuses what is no option of vLLM's: vLLM would say so after some twenty seconds, in hundreds of lines."""
    known = _options_of_vllm()
    for word in options if known else ():
        name = word.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
        # Abbreviations are options, too.
        if not name.startswith("--") or any(each.startswith(name) for each in known):
            continue
        if near := get_close_matches(name, [*known, *_OWN], 1, 0.8):
            raise KeepsetError(f"There is no option {name}: did you mean {near[0]}?")
        raise KeepsetError(f"vLLM has no option {name}: its documentation lists those of `vllm serve`.")


def _options_of_vllm() -> set[str]:
    """Those of `vllm serve`, read out of its sources: to import it takes long. None where they lie elsewhere."""
    spec = importlib.util.find_spec("vllm")
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or []]
    files = [[file for folder in folders for file in folder.glob(pattern)] for pattern in _SOURCES]
    if not all(files):
        return set()
    texts = [file.read_text(encoding="utf-8") for some in files for file in some]
    fields = {f"--{name.replace('_', '-')}" for text in texts for name in re.findall(r"^    (\w+):", text, re.M)}
    flags = {flag for text in texts for flag in re.findall(r"\"(--[a-z0-9-]+)\"", text)}
    known = fields | flags
    negated = (("--", "--no-"), ("--enable-", "--disable-"), ("--disable-", "--enable-"))
    return known | {each.replace(*words, 1) for words in negated for each in known}
