"""What keeps a run alive and observable; it never changes a number of the training.

In the order of a run: flags (with ranges), terminal, agree, intake, assemble, restart, log; then
kernels, collectives, profiling.
"""
