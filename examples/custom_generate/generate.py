"""Hugging Face's custom generation under a recipe, from this folder or from a repository on the hub that has it:

model.generate(**prompt, custom_generate="examples", trust_remote_code=True, recipe="snapkv(bytes=0.25)")
"""

import keepset


def generate(model, recipe="glance(bytes=0.25)", **options):
    """What `model.generate` gives, of a prompt that is cached by the recipe; each call has a cache of its own."""
    return model.generate(**options, past_key_values=keepset.Cache(model, recipe))
