"""One module per family of operations; each defines ``FAMILY``. The registry finds them by file name."""
