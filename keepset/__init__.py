"""keepset decides which entries of a language model's KV cache to keep, and really frees the rest.

A method reads an `Observation` and returns a `KeepSet`; a runtime executes the `KeepSet`.
"""

import lazy_loader

__version__ = "0.1.0"

# The stub beside this file lists the names. They are resolved on first use, because importing torch takes a second.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
