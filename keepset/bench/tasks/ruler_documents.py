"""RULER's questions about documents, of SQuAD and HotpotQA."""

import inspect
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keepset import texts
from keepset.bench.tasks.harness_imports import import_extra
from keepset.bench.tasks.ruler_prompts import PromptMaker, PromptParts, cut
from keepset.errors import KeepsetError

_ASKED = "\n\nAnswer the question based on the given documents."
DocumentQuestion = tuple[str, list[str], list[str], list[str]]
"""A question, its answers, the documents that it needs, and others that are preferred to the rest."""


class Documents(PromptMaker):
    """A question, and the documents that answer it among others.

    The seed draws the order of the questions. The authors' program takes them in the file's order, all of one article
    first.
    """

    def __init__(self, entries: Sequence[DocumentQuestion]) -> None:
        if not entries:
            raise ValueError("no questions")
        self._documents = sorted({document for entry in entries for group in entry[2:] for document in group})
        number = {document: index for index, document in enumerate(self._documents)}
        self._questions = [
            {
                "query": query,
                "outputs": answers,
                "context": [number[document] for document in needed],
                "more_context": [number[document] for document in related],
            }
            for query, answers, needed, related in entries
        ]
        self.largest, self.questions = len(self._documents), len(self._questions)
        self._qa = import_extra("lm_eval.tasks.ruler.qa_utils")

    def make(self, size: int, index: int, seed: int) -> PromptParts:
        """Return the question with `size` documents, or with all that it needs if they are more."""
        chosen = random.Random(seed).sample(range(len(self._questions)), len(self._questions))[index]
        # The harness shuffles the list that it is given if all documents fit, so it gets a copy.
        text, answers = self._qa.generate_input_output(chosen, size, self._questions, list(self._documents))
        return cut(f"{text} Answer:", _ASKED, answers)


def load_documents(name: str, folder: Path | None) -> Documents:
    """Return documents and questions.

    Args:
        name: `squad` or `hotpot`.
        folder: a user's folder with `<name>.json`; the harness downloads the file if there is none.

    Raises:
        KeepsetError: if the file has another format, or cannot be downloaded.
    """
    parse = _PARSERS[name]
    path = None if folder is None else folder / f"{name}.json"
    if path is None or not path.is_file():
        return Documents(parse(_download(name)))
    try:
        return Documents(parse(json.loads(texts.read(path))))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KeepsetError(
            f"{str(path)!r} is not in the format of {_OFFICIAL[name]} ({type(error).__name__}: {error}): "
            "put that file there."
        ) from error


def _squad(data: Any) -> list[DocumentQuestion]:
    entries = []
    for article in data["data"]:
        documents = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            needed = paragraph["context"]
            related = [document for document in documents if document != needed]
            for item in paragraph["qas"]:
                if not item.get("is_impossible"):
                    entries.append((item["question"], [a["text"] for a in item["answers"]], [needed], related))
    return entries


def _hotpot(data: Any) -> list[DocumentQuestion]:
    return [
        (item["question"], [item["answer"]], [f"{title}\n{''.join(text)}" for title, text in item["context"]], [])
        for item in data
    ]


def _download(name: str) -> Any:
    qa, requests = import_extra("lm_eval.tasks.ruler.qa_utils"), import_extra("requests")
    reader = qa.read_squad if name == "squad" else qa.read_hotpotqa
    url = inspect.signature(reader).parameters["url"].default
    try:
        return qa.download_json(url)
    except (requests.RequestException, ValueError) as error:
        raise KeepsetError(
            f"The questions of {name} cannot be downloaded ({type(error).__name__}): put {_OFFICIAL[name]} into a "
            f"folder as {name}.json, and give that folder as data."
        ) from error


_PARSERS: dict[str, Callable[[Any], list[DocumentQuestion]]] = {"squad": _squad, "hotpot": _hotpot}
_OFFICIAL = {"squad": "SQuAD's dev-v2.0.json", "hotpot": "HotpotQA's hotpot_dev_distractor_v1.json"}
