"""Recording of the queries between two events, for every runtime: which features need them, and where they wait."""
