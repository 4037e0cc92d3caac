"""Ask a context again and again: read it once, keep a quarter of it in a file, and ask any number of questions.

`reread` takes two to three prefills, once. `ask` goes on with a copy, so questions do not disturb each other.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import keepset

model, tokenizer = keepset.models.load()
facts = "Oslo's secret number is 48217. The lighthouse is kept by Harald Berg."
document = tokenizer(facts + " Then they agreed on the minutes of May and went home." * 60, return_tensors="pt")

cache = keepset.Cache(model, "reread(bytes=0.25)")
with torch.no_grad():
    model(**document, past_key_values=cache, logits_to_keep=1)  # reads the document, and answers nothing

with TemporaryDirectory() as folder:
    file = Path(folder) / "document.safetensors"
    cache.save(file)
    cache = keepset.Cache.load(file, model)  # on another day

for opening in ("Oslo's secret number is", "The lighthouse is kept by"):
    question = tokenizer(f"\n\n{opening}", add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**cache.ask(**question), max_new_tokens=6, do_sample=False)
    print(tokenizer.decode(answer[0]).strip())
print(cache)
