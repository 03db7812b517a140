"""Run many trainings and show what they measured; nothing here trains, it starts programs that do.

Read studies (which runs), attempts (one run), slurm (runs in job arrays), results (what was
measured), folder (all of a sweep), bottleneck (what limits a run), figures (made with drawing),
ladder (one study), report. sweep.py, on the top level, is the command.
"""
