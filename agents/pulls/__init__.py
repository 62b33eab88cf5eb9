"""Pull requests: one accepted candidate offered for merge. ``local.py`` keeps them in a git repository."""
