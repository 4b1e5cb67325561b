"""The sections of the report: each measures one thing and gives figures, notes and the data of its picture."""
