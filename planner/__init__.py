"""What a run will need: read machines, traffic, memory, estimate (from these three), dry_run."""
