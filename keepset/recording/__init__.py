"""Recording of the queries between two events: what it is for, and where queries wait, under every runtime."""
