#!/bin/bash
# Slurm runs this before every task and puts `export NAME=value` that it prints into its environment.
# --gpu-bind=closest goes by the cores a task is bound to. Nothing is bound here (64 pretended cores
# on a few real ones), so Slurm leaves all GCDs visible, and this gives local rank 0..7 the GCD that
# OLCF publishes for its srun line. With another --gpu-bind, Slurm's own answer stands.
if [ "${SLURMD_TRES_BIND:-}" = gpu:closest ] && [ "${SLURM_LOCALID:-8}" -lt 8 ]; then
    gcd=(4 5 2 3 6 7 0 1)
    echo "export ROCR_VISIBLE_DEVICES=${gcd[$SLURM_LOCALID]}"
fi
