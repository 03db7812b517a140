"""What a run will need, by arithmetic and by a dry run; nothing here trains.

Read machines (what a device and its links give), demand (what a step asks of a rank), dryrun (one
step with fake ranks). plan.py, on the top level, is the command.
"""
