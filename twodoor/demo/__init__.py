"""The demonstration: all entrances of a real stack at work at the same time, over real text, every row counted."""
