"""The central types: what a method sees (`Observation`), and what it returns (`KeepSet`)."""
