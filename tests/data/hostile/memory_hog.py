"""Takes all the memory it can get.

Verdict: compile.memory
"""

hoard = []
while True:
    hoard.append(bytearray(64 << 20))
