"""Aborts, as a crashing compiler would.

Verdict: compile.exit
"""

import dataclasses

dataclasses.sys.modules["os"].abort()
