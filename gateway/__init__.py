"""The interactive door: FastAPI before the shared core. No model and no GPU here."""
