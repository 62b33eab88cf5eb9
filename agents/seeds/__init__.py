"""Seed candidates: one file per family, correct and not naive, that a job starts from when nothing was merged yet."""
