"""Many runs and what they show; nothing here trains or plans, it starts programs that do.

Read studies (which runs), attempts (one run), results (what was measured), bottleneck (what limits
a run), figures (drawn with drawing), report. sweep.py, on the top level, is the command.
"""
