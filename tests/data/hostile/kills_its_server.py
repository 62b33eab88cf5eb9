"""Kills the process that started it.

Verdict: compile.sandbox
"""

import dataclasses

os = dataclasses.sys.modules["os"]
os.kill(os.getppid(), 9)
