"""Random walks: a cache goes through random operations, and after each of them it is held against a dense reference."""
