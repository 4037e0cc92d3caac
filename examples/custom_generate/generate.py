"""Hugging Face's custom generation under a recipe, from this folder or from a repository on the hub that has it:

model.generate(**prompt, custom_generate="examples", trust_remote_code=True, recipe="snapkv(bytes=0.25)")
"""

import keepset


def generate(model, recipe="glance(bytes=0.25)", **options):
    """Return the result of `model.generate` with a prompt cached by the recipe; each call has its own cache."""
    return model.generate(**options, past_key_values=keepset.Cache(model, recipe))
