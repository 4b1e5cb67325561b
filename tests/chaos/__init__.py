"""Fault injection: the real stack under load while a seeded plan breaks it, and what must still hold after each round."""
