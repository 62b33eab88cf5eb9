"""Shared device functions for candidates. Changed only by people; a change re-verifies every dependent kernel."""
