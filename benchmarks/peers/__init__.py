"""Other ways to serve the same model, measured by the same callers; see docs/benchmarks.md."""
