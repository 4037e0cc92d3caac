"""The things besides entries that a method can look at, one file each."""
