"""Generation jobs: an event log in SQLite, lanes that verify proposals, a budget, and a resume after any kill."""
