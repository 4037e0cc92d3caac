"""Compress a prompt: answer a long prompt from a quarter of its cache.

`glance` looks at the prompt once, at its end. The cache reports the bytes that it really holds.
"""

import keepset
from keepset.lab.texts import essay

model, tokenizer = keepset.models.load()  # a small embedded model; a name or a folder loads yours
prompt = tokenizer(essay()[:4000] + "\n\nIn short, the author", return_tensors="pt")

cache = keepset.Cache(model, "glance(bytes=0.25)")
answer = model.generate(**prompt, past_key_values=cache, max_new_tokens=24, do_sample=False)

print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]))
print(cache)
