"""What a run will need: read machines.py, traffic.py, memory.py, estimate.py."""
