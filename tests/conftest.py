"""One torch thread in each test process: the tensors are small, and threads that spin for a busy core cost minutes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
