"""A tokenizer whose tokens are letters, for tiny models: texts say all that there is."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = [chr(code) for code in (10, *range(32, 127), *range(0xC0, 0xC0 + 101))]
CHAT = "<bos>U:{{ messages[0]['content'] }}.\nA:"


def letters(template: str | None = None) -> PreTrainedTokenizerFast:
    """Every letter is a token, and three more are for padding, beginning and end."""
    names = ["<pad>", "<bos>", "<eos>", *LETTERS]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
