"""What to build: operations as data, with references, tolerances, workloads and bounds."""
