"""Serve under vLLM and ask with the OpenAI client, which need not know about keepset.

In another terminal, with the small embedded model or a MODEL of yours before the options:

    pip install ".[vllm]" openai
    keepset serve --recipe "glance(keep=128)"
"""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
report = """
The well was dug in 1887. Before that, people carried water from the river, half an hour away, and in dry summers from
the mill. The first stones came from the old church, whose tower had fallen in a storm. Anna, the miller's daughter,
paid for the rope and the bucket, and her brother built the roof that is still there. For sixty years everyone met at
the well in the evening: news was told, horses were sold, and many a marriage began with a jug that was too heavy. When
pipes were laid, the mayor wanted to fill it with sand. The school's children stood around it, hand in hand, until he
gave up. Today tourists throw coins into it, which the fire brigade collects each autumn for its summer feast.
"""

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
