"""Compare recipes on a text: which one predicts the following tokens like the full cache, in a quarter of the memory?

KL(full || compressed) in nats per token, and how often both hold the same token for the likeliest. `keepset compare`
has more figures, `keepset tune` more recipes, and both share one prefill.
"""

import torch
from torch.nn.functional import kl_div

import keepset
from keepset.lab.texts import essay

RECIPES = ("random", "streaming_llm", "snapkv", "glance", "reread")

model, tokenizer = keepset.models.load()
ids = tokenizer(essay()[:4000], return_tensors="pt")["input_ids"]
prompt, following = ids[:, :512], ids[:, 512:576]


@torch.no_grad()
def predictions(recipe: str) -> torch.Tensor:
    """Return log-probabilities after each of the following tokens, with the prompt cached by a recipe."""
    cache = keepset.Cache(model, recipe)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    return model(following, past_key_values=cache).logits[0].log_softmax(-1)


full = predictions("streaming_llm(keep=1.0)")
for name in RECIPES:
    kept = predictions(f"{name}(bytes=0.25)")
    kl = kl_div(kept, full, log_target=True, reduction="batchmean")
    same = (kept.argmax(-1) == full.argmax(-1)).float().mean()
    print(f"{name:14} KL {kl:.4f}   same likeliest token {same:4.0%}")
