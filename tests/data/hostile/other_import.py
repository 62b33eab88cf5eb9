"""Imports what a candidate may not.

Verdict: audit.import
"""

import subprocess  # noqa: F401
