"""Write your own method: it gives every entry a score, and keepset keeps the best.

It then composes with every allocator, runs under transformers and vLLM, and has a text form.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

import keepset


@keepset.register
@dataclass(frozen=True)
class LoudValues(keepset.Method):
    """Keeps the entries with the longest values, and the newest tokens."""

    name = "loud_values"
    traits = keepset.Traits(recent=16)

    power: float = keepset.parameter(1.0, minimum=0.0)

    def score(self, observation: keepset.Observation) -> Float[Tensor, "batch kv_heads entries"]:
        return observation.values.float().norm(dim=-1) ** self.power


model, tokenizer = keepset.models.load()
prompt = tokenizer(
    "The capital of Norway is Oslo. " + "They went home. " * 40 + "The capital of Norway is", return_tensors="pt"
)
for recipe in ("loud_values(keep=0.5)", "adakv(loud_values(power=2.0), keep=0.5)"):
    cache = keepset.Cache(model, recipe)
    answer = model.generate(**prompt, past_key_values=cache, max_new_tokens=3, do_sample=False)
    print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]), cache.keep_set)
