"""Writes file after file into its own folder.

Verdict: compile.output
Seconds: 60
"""

number = 0
while True:
    with open(f"filler{number}", "wb") as file:
        file.write(bytes(32 << 20))
    number += 1
