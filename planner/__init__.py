"""What a run will need, by arithmetic and by a dry run; nothing here trains.

Read machines (what a device and its links give), traffic (what a step sends), memory (what is live
at each moment of a step), estimate (the plan of a run, from these three, and what would fit
instead), dry_run (one step with fake ranks). plan.py, on the top level, prints a plan.
"""
