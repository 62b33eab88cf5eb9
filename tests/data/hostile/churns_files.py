"""Makes and removes files as fast as it can, so that they vanish while they are counted.

Verdict: compile.timeout
Seconds: 2
"""

import dataclasses

os = dataclasses.sys.modules["os"]
while True:
    for number in range(100):
        open(f"churn{number}", "wb").close()
    for number in range(100):
        os.unlink(f"churn{number}")
