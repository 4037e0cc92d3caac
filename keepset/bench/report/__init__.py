"""Tables for the terminal and for pages, and HTML pages that are each one file."""
