"""Writes into the folder above its own.

Verdict: compile.sandbox
"""

with open("../escaped", "w") as file:
    file.write("out")
