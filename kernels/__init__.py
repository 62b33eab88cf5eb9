"""What was accepted: shared device functions, merged kernels, and (later) the decode path."""
