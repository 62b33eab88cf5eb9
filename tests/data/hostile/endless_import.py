"""Never ends when it is imported.

Verdict: compile.timeout
Seconds: 2
"""

while True:
    pass
