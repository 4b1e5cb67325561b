"""One small server per peer. Each runs in its peer's own environment and imports nothing of Twodoor."""
