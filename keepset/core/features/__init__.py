"""What a method can look at besides entries, one file each."""
