"""What the cells of a sweep come to: intervals, tables, curves, needle maps."""
