"""What methods were called in recipes that somebody may have saved. It stands apart: no more is loaded to read them."""

FORMER_NAMES = {"received": "second_pass", "echo": "prompt_queries"}
