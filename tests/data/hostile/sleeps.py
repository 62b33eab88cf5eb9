"""Waits for ever without using the processor, and ignores signals that can be ignored.

Verdict: compile.timeout
Seconds: 2
"""

import dataclasses

signal = __import__("signal")
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
while True:
    dataclasses.sys.modules["time"].sleep(1000)
