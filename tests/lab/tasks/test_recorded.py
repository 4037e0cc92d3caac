"""Recorded conversations: tiny files of each format, and the published ones where they are."""

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest

from keepset import KeepsetError
from keepset.errors import CorruptFileError
from keepset.lab.tasks.chat import ChatSettings, RecordedTask
from keepset.lab.tasks.chat_example import ChatExample
from keepset.lab.tasks.find import find
from keepset.lab.tasks.recorded import read_recordings

PUBLISHED = Path("/work/shared/data/locomo10.zip")

LOCOMO = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ann",
        "speaker_b": "Ben",
        "session_1_date_time": "1 pm on 2 May, 2023",
        "session_1": [
            {"speaker": "Ben", "dia_id": "D1:1", "text": "I have a new dog."},
            {"speaker": "Ann", "dia_id": "D1:2", "text": "What is its name?"},
            {"speaker": "Ben", "dia_id": "D1:3", "text": "Look.", "blip_caption": "a photo of a dog"},
            {"speaker": "Ben", "dia_id": "D1:4", "text": "It is called Rex."},
        ],
        "session_10_date_time": "4 pm on 9 June, 2023",
        "session_10": [{"speaker": "Ann", "dia_id": "D10:1", "text": "Nobody answers this."}],
        "session_2_date_time": "3 pm on 8 June, 2023",
        "session_2": [
            {"speaker": "Ann", "dia_id": "D2:1", "text": "I moved to Oslo."},
            {"speaker": "Ben", "dia_id": "D2:2", "text": "Great!"},
        ],
    },
    "qa": [
        {"question": "What is the dog's name?", "answer": "Rex", "evidence": ["D1:4"], "category": 4},
        {"question": "Where does Ann live, with Ben's dog?", "answer": 7, "evidence": ["D1:1; D2:1"], "category": 1},
        {"question": "Who answers?", "answer": "nobody", "evidence": ["D10:1"], "category": 4},
        {"question": "Was it told?", "adversarial_answer": "yes", "evidence": ["D1:1"], "category": 5},
        {"question": "By whom?", "answer": "Ben", "evidence": [], "category": 3},
        {"question": "In which line?", "answer": "none", "evidence": ["D9:1"], "category": 3},
    ],
}
SHAREGPT = [
    {
        "id": "a_0",
        "conversations": [
            {"from": "gpt", "value": "Too early."},
            {"from": "system", "value": "Be kind."},
            {"from": "human", "value": "Hello"},
            {"from": "human", "value": "Are you there?"},
            {"from": "gpt", "value": "Yes."},
            {"from": "user", "value": "And now?"},
            {"from": "chatgpt", "value": "Still here."},
            {"from": "human", "value": "Bye"},
        ],
    },
    {"id": "a_1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "tool", "value": "1"}]},
    {"id": "a_2", "conversations": []},
]
MT_EVAL = [{"id": "1", "conv": [{"user": f"Ask {n}", "sys": f"Answer {n}", "do_inference": True} for n in range(4)]}]


def written(folder: Path, value: Any, *, lines: bool = False) -> Path:
    path = folder / "chats.json"
    path.write_text("\n".join(map(json.dumps, value)) if lines else json.dumps(value), "utf-8")
    return path


def task(path: Path, length: int = 400, compactions: int = 1, questions: int = 10) -> RecordedTask:
    [made] = find(["chat"], ChatSettings(None, (length,), 15, (compactions,), questions, file=path))
    assert isinstance(made, RecordedTask)
    return made


def roles(example: ChatExample) -> list[str]:
    return ["".join(message["role"][0] for message in turn) for turn in example.turns]


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("is_flat", [False, True])
def test_locomo_has_questions_about_its_conversations(
    is_list: bool, is_flat: bool, tmp_path: Path, tokenizer: Any
) -> None:
    item = {"qa": LOCOMO["qa"], **dict(LOCOMO["conversation"])} if is_flat else LOCOMO  # type: ignore[call-overload]
    made = task(written(tmp_path, [item] if is_list else item))
    assert made.name == "locomo@400, compressed once" and made.metric == "f1"
    [example] = made.examples(tokenizer)
    assert [[message["content"] for message in turn] for turn in example.turns] == [
        ["(1 pm on 2 May, 2023)", "Ben: I have a new dog."],
        ["Ann: What is its name?", "Ben: Look. [photo: a photo of a dog]\nBen: It is called Rex."],
        ["(3 pm on 8 June, 2023)\nAnn: I moved to Oslo.", "Ben: Great!"],
    ]
    assert roles(example) == ["ua", "ua", "ua"]
    asked = [(question.told, question.target, question.groups) for question in example.asked]
    assert asked == [(2, "Rex", ("told 2 to 2", "category 4")), (3, "7", ("told 3 to 3", "category 1"))]
    assert "What is the dog's name?" in example.asked[0].text


def test_a_part_that_fits_has_only_questions_about_itself(tmp_path: Path, tokenizer: Any) -> None:
    path = written(tmp_path, LOCOMO)
    [whole] = task(path).examples(tokenizer)
    length = task(path).count(tokenizer, whole) - 1
    [part] = task(path, length).examples(tokenizer)
    assert part.turns == whole.turns[:2] and [question.target for question in part.asked] == ["Rex"]
    assert task(path, length).count(tokenizer, part) <= length
    [one] = task(path, questions=1).examples(tokenizer)
    assert len(one.asked) == 1
    for wrong, options in ((30, {}), (400, {"compactions": 4})):
        with pytest.raises(KeepsetError, match=f"No conversation of the file has . turns and a question in {wrong}"):
            task(path, wrong, **options).examples(tokenizer)


def test_the_last_recorded_answer_is_judged_where_nothing_is_asked(tmp_path: Path, tokenizer: Any) -> None:
    made = task(written(tmp_path, SHAREGPT))
    assert made.name == "sharegpt@400, compressed once" and made.metric == "likelihood"
    [example] = made.examples(tokenizer)
    assert roles(example) == ["sua"]
    assert [message["content"] for message in example.messages] == ["Be kind.", "Hello\nAre you there?", "Yes."]
    [question] = example.asked
    assert (question.text, question.choices) == ("And now?", ("Still here.",))
    tokens = len(tokenizer("Still here.")["input_ids"])
    assert made.judge(question, [(-2.0 * tokens, False)]) == {"likelihood": pytest.approx(math.exp(-2))}


@pytest.mark.parametrize("lines", [False, True])
def test_mt_eval_is_judged_by_its_last_answer_that_fits(lines: bool, tmp_path: Path, tokenizer: Any) -> None:
    path = written(tmp_path, MT_EVAL, lines=lines)
    [example] = task(path, compactions=3).examples(tokenizer)
    assert len(example.turns) == 3 and example.asked[0].choices == ("Answer 3",)
    length = task(path).count(tokenizer, example) - 1
    [part] = task(path, length).examples(tokenizer)
    assert len(part.turns) == 2 and (part.asked[0].text, part.asked[0].choices) == ("Ask 2", ("Answer 2",))


def test_answers_are_judged_by_their_words(tmp_path: Path, tokenizer: Any) -> None:
    made = task(written(tmp_path, LOCOMO))
    question = made.examples(tokenizer)[0].asked[0]
    for reply, score in (("Rex", 1), (" The REX.", 1), ("It is Rex", 1 / 2), ("Rex Rex", 2 / 3), ("Max", 0), ("", 0)):
        assert made.judge(question, reply) == {"f1": pytest.approx(score)}


@pytest.mark.parametrize(
    ("text", "error", "because"),
    [
        ('[{"messages": []}]', KeepsetError, "holds no conversations of a known format: give a JSON file"),
        ("[]", KeepsetError, "holds no conversations of a known format"),
        ("7", KeepsetError, "holds no conversations of a known format"),
        ('["a"]', KeepsetError, "holds no conversations of a known format"),
        ('[{"conversations": [{"value": "no speaker"}]}]', KeepsetError, "of a known format"),
        ('{"conv": []}\nnot json', CorruptFileError, "line 2, is no JSON object: give a JSON file"),
        ('[{"conv": []}, {"conversations": []}]', CorruptFileError, "Conversation 2 of .* is not like the first one"),
        ('{"qa": [{}], "session_1": []}', CorruptFileError, "Conversation 1 of .* is not like the first one"),
        ("", KeepsetError, "is empty"),
    ],
)
def test_other_files_are_refused_in_one_sentence(
    text: str, error: type[Exception], because: str, tmp_path: Path
) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text, "utf-8")
    with pytest.raises(error, match=because) as raised:
        read_recordings(path)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


def test_a_file_has_conversations_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(KeepsetError, match="ask for chat with it, and not for chat_kv"):
        find(["chat_kv"], ChatSettings(file=written(tmp_path, LOCOMO)))
    with pytest.raises(KeepsetError, match="cannot be read"):
        find(["chat"], ChatSettings(file=tmp_path / "none.json"))


@pytest.mark.full
@pytest.mark.skipif(not PUBLISHED.is_file(), reason="LoCoMo is not here")
def test_the_published_conversations_are_read(tmp_path: Path, tokenizer: Any) -> None:
    with zipfile.ZipFile(PUBLISHED) as published:
        items = [json.loads(published.read(name)) for name in published.namelist() if name.endswith(".json")]
    recording = read_recordings(written(tmp_path, items))
    asked = [question for item in items for question in item["qa"] if question["category"] != 5]
    questions = [question for chat in recording.chats for question in chat.questions]
    assert len(recording.chats) == 10 and 0.98 * len(asked) < len(questions) <= len(asked)
    for example in task(tmp_path / "chats.json", 2048).examples(tokenizer, limit=2):
        assert 0.9 * 2048 < task(tmp_path / "chats.json", 2048).count(tokenizer, example) <= 2048
