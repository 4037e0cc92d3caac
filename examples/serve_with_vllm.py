"""Serve under vLLM and ask with the OpenAI client, which needs to know nothing of keepset.

In another terminal, with the small embedded model or a MODEL of yours before the options:

    pip install "keepset[vllm]" openai
    keepset serve --recipe "snapkv(keep=128, every=64)"
"""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
report = "The well was dug in 1887. " + "Nobody in the village remembered who had paid for it. " * 20

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": report + "When was the well dug?"}],
    max_tokens=48,
    temperature=0,
    stream=True,
)
for piece in answer:
    print(piece.choices[0].delta.content or "", end="", flush=True)
print()
