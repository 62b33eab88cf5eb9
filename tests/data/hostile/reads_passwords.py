"""Reads a file outside of the allow-list.

Verdict: compile.sandbox
"""

with open("/etc/passwd") as file:
    print(file.read())
