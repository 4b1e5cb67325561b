"""Benchmarks: they drive the running stack from outside and compare within one run, so that a noisy machine matters less."""
