"""Tables for the terminal and for pages, and HTML pages of one file each."""
