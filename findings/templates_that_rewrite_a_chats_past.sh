#!/usr/bin/env bash
# The chat templates that llama-cpp-python 0.3.36 brings (llama.cpp, models/templates), rendered by transformers 5.19.0.
#
# A server that keeps the cache of a chat needs each prompt to begin with the prompt and the answer before it. The
# simplest chat is rendered with each of the 70 templates: a system message, two turns of a user, plain answers, no
# tools, no reasoning. Of the 65 that can render it, about half do so. Nothing in a template says which kind it is.
#
# Seen:
#   33  prompt and answer begin the next prompt
#   14  only the prompt does: the answer is rendered otherwise than it was sampled
#   17  the end of the prompt is rendered otherwise once it is answered
#    1  Mistral Nemo's puts the system message before the user's *last* message, so it wanders from turn to turn: all
#       tokens from the first message on change with every turn, and no turn finds the cache of the one before
#    5  cannot render this chat (no system role, or they need tools or documents)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.19.0 jinja2
"$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
    --dest "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder" --wildcards '*/vendor/llama.cpp/models/templates/*'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from collections import defaultdict
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

roles = ["system", "user", "assistant", "user"]
texts = ["SYSTEM WORDS", "FIRST WORDS", "ANSWER WORDS", "SECOND WORDS"]
chat = [{"role": role, "content": text} for role, text in zip(roles, texts)]


def rendered(template, messages, begin_answer):
    prompts, _ = render_jinja_template(
        [messages], chat_template=template, bos_token="<s>", eos_token="</s>", add_generation_prompt=begin_answer
    )
    return prompts[0]


kinds = defaultdict(list)
for path in sorted(Path(sys.argv[1]).glob("*/vendor/llama.cpp/models/templates/*.jinja")):
    template = path.read_text()
    try:
        first, second = rendered(template, chat[:2], True), rendered(template, chat, True)
    except Exception:
        kinds["cannot render this chat"].append(path.stem)
        continue
    places = [second.find(text) for text in texts]
    if places[0] < 0 or places[0] > places[1]:
        kinds["moves or drops the system message"].append(path.stem)
    elif second.startswith(first + texts[2]):
        kinds["prompt and answer begin the next prompt"].append(path.stem)
    elif second.startswith(first):
        kinds["only the prompt begins the next prompt"].append(path.stem)
    else:
        kinds["changes what comes before the answer"].append(path.stem)
for kind, names in sorted(kinds.items()):
    print(f"{len(names):3}  {kind}" + (f": {', '.join(names)}" if len(names) < 12 else ""))
assert {kind: len(names) for kind, names in kinds.items()} == {
    "prompt and answer begin the next prompt": 33,
    "only the prompt begins the next prompt": 14,
    "changes what comes before the answer": 17,
    "moves or drops the system message": 1,
    "cannot render this chat": 5,
}
print("as described")
PYTHON
