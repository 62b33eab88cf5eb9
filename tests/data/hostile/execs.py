"""Becomes another program.

Verdict: compile.sandbox
"""

import dataclasses

dataclasses.sys.modules["os"].execv(dataclasses.sys.executable, ["python", "-c", "print(1)"])
