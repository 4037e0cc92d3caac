"""Long answers: `every=` compresses again while the answer grows, so that it never holds much more than `keep`."""

import keepset

model, tokenizer = keepset.models.load()
prompt = tokenizer("Once upon a time there was a miller who had three sons.", return_tensors="pt")

cache = keepset.Cache(model, "snapkv(window=16, keep=48, every=16)", history=True)
answer = model.generate(
    **prompt, past_key_values=cache, max_new_tokens=96, min_new_tokens=96, do_sample=False, repetition_penalty=1.2
)

print(tokenizer.decode(answer[0], skip_special_tokens=True))
for event in cache.events:
    print(f"after {event.length:3} tokens: {int(event.keep_set.counts[0, 0, 0])} entries of a head stay")
print(cache)
