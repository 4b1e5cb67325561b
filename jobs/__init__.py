"""What is kept of a job: its states, intake, chunks, results, objects, control and the ledger's migrations."""
