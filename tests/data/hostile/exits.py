"""Ends the interpreter with success.

Verdict: compile.exit
"""

import dataclasses

dataclasses.sys.exit(0)
