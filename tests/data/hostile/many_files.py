"""Makes empty files without end.

Verdict: compile.output
Seconds: 60
"""

number = 0
while True:
    open(f"empty{number}", "wb").close()
    number += 1
