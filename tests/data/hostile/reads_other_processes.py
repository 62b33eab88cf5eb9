"""Reads the environment of the process that started it.

Verdict: compile.sandbox
"""

import dataclasses

with open(f"/proc/{dataclasses.sys.modules['os'].getppid()}/environ", "rb") as file:
    print(file.read())
