"""What a run will need, by arithmetic and by a dry run; nothing here trains.

Read machines (what a device and its links give), memory (what a step asks of a rank: bytes kept and
bytes sent), dry_run (one step with fake ranks). plan.py, on the top level, is the command.
"""
