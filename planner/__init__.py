"""What a run will need: read machines.py, traffic.py, memory.py, estimate.py, then dry_run.py."""
