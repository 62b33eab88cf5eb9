"""Prints a gigabyte.

Verdict: compile.output
"""

for _ in range(1 << 10):
    print("x" * (1 << 20))
