#!/bin/bash
# From sbatch to a finished run, on any Slurm; every argument goes to train_fsdp.py.
#
#   sbatch -A PROJECT launch_frontier.sh --model 3b --mode hybrid --group 2 --data DIR --out OUT
#   CONDA_ENV=NAME sbatch -A ACCOUNT -p PARTITION -N 2 --exclusive --gpus-per-node=4 \
#       launch_frontier.sh ...
#
# The first is for Frontier, the second for any other cluster with NVIDIA or AMD GPUs: the script
# finds out by itself where it is. Submit from the folder of the scripts. docs/frontier.md explains
# each flag and each variable: what appears below as NAME:-default is taken from the environment of
# sbatch, if it is set there.
#SBATCH -J vit-mae
#SBATCH -N 2
#SBATCH -t 2:00:00
#SBATCH -o %x-%j.out
# A round is one job of a run. The next one appends to the same file; after a node has failed Slurm
# itself starts one.
#SBATCH --open-mode=append
#SBATCH --requeue
# To the ranks, not to this shell: 5 minutes before the end they save and exit with status 0.
#SBATCH --signal=USR1@300
# Slingshot: one half of a setting; the other half is the module rccl-net-plugin. Other networks
# ignore it.
#SBATCH --network=disable_rdzv_get
set -euo pipefail

say() { echo "launch_frontier.sh: $*"; }
fail() { say "error: $*" >&2; exit 1; }

[[ -n ${SLURM_JOB_ID:-} ]] || fail "not in a Slurm job: sbatch -A PROJECT launch_frontier.sh ..."
cd "${SCRIPTS:-$SLURM_SUBMIT_DIR}" # Slurm runs a copy of this file from another folder
[[ -f train_fsdp.py ]] || fail "no train_fsdp.py in $PWD: submit from its folder, or set SCRIPTS"

out=out run=real last=
for word in "$@"; do # two flags that this script has to know as well
    case $last in --out) out=$word ;; --run | --run-mode) run=$word ;; esac
    case $word in --out=*) out=${word#*=} ;; --run=* | --run-mode=*) run=${word#*=} ;; esac
    last=$word
done

# ---- the machine

# A rank without its GPU is an error, not a CPU run; a --device in "$@" comes later and wins.
device=(--device cuda)
nodes=$SLURM_JOB_NUM_NODES why="as it was set"
if [[ -z ${MACHINE:-} ]]; then
    MACHINE=slurm why="this is not Frontier"
    [[ ${LMOD_SYSTEM_NAME:-${SLURM_CLUSTER_NAME:-}} != frontier ]] ||
        MACHINE=frontier why="by LMOD_SYSTEM_NAME, or Slurm's name of the cluster"
fi
case $MACHINE in
    frontier)
        # One rank per GCD, next to its L3 region, which has 7 free cores of 8.
        tasks=${TASKS_PER_NODE:-8} cores=${CPUS_PER_TASK:-7} port=${MASTER_PORT:-3442}
        gpu=(--gpus-per-task=1 --gpu-bind="${GPU_BIND:-closest}")
        nvme=${NVME_DIR:-/mnt/bb/$(id -un)}
        # OLCF's list, in its order: plugin and target depend on the ROCm that is loaded.
        modules="PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 rccl-net-plugin"
        modules=${MODULES-$modules craype-accel-amd-gfx90a}
        # Without the plugin RCCL would use TCP, very slowly: OFI makes that an error. On one node
        # there is no network to start the plugin on.
        if ((nodes > 1)); then net=OFI; else net=Socket; fi
        ;;
    slurm)
        [[ -z ${SLURM_GPUS:-} ]] || fail "--gpus does not say how many per node: --gpus-per-node=4"
        # What was asked for, such as gres:gpu:a100:4: srun gives a step no more, though
        # SLURM_GPUS_ON_NODE counts all GPUs of a node that the job has for itself.
        read -r shared gres < <(squeue -hj "$SLURM_JOB_ID" -o '%h %b' 2>/dev/null) || gres=
        gres=${gres//gres[:\/]/} gpus=${SLURM_GPUS_ON_NODE:-}
        [[ ! $gres =~ gpu:([^,]*:)?([0-9]+) ]] || gpus=${BASH_REMATCH[2]}
        [[ -n $gpus ]] || {
            say "warning: Slurm has given this job no GPU, so the run is on CPUs: add" \
                "--gpus-per-node=N or --gres=gpu:N to sbatch"
            device=()
        }
        tasks=${TASKS_PER_NODE:-${gpus:-1}}
        cores=${CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / tasks))}
        ((cores)) || fail "the job has $SLURM_CPUS_ON_NODE CPUs per node for $tasks ranks:" \
            "give sbatch --exclusive, or --cpus-per-gpu=8"
        # Every rank sees all GPUs that the job has on its node: NCCL copies between them directly
        # only then. srun gives a step all of them, if the flags of sbatch do not reach it.
        unset SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU
        gpu=(${GPU_BIND:+--gpus-per-task=1 --gpu-bind="$GPU_BIND"})
        port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # jobs may share a node
        nvme=${NVME_DIR:-${TMPDIR:-/tmp}} modules=${MODULES-} net=
        ;;
    *) fail "MACHINE is $MACHINE, but must be frontier or slurm" ;;
esac
say "MACHINE is $MACHINE ($why): $nodes x $tasks ranks, $cores CPUs each"

case ${AGAIN:=requeue} in
    requeue | chain | no) ;;
    *) fail "AGAIN is $AGAIN, but must be requeue, chain or no" ;;
esac

# `module` and `conda activate` are functions that login shells read; a script may have to do it.
find_module() {
    # shellcheck disable=SC1091 # a file of Lmod, or of Environment Modules
    [[ $(type -t module) ]] || . "${MODULESHOME:-}/init/bash"
}
find_conda() {
    local base exe=${CONDA_EXE:-}
    [[ $(type -t conda) != function ]] || return 0 # a module has defined it
    for base in "${CONDA_BASE:-}" "${exe%/*/*}" "${CONDA_PREFIX:-}" "$(conda info --base)"; do
        [[ -n $base && -f $base/etc/profile.d/conda.sh ]] || continue
        # shellcheck disable=SC1091 # a file of conda
        . "$base/etc/profile.d/conda.sh"
        return
    done
    return 1
}

set +u # Lmod and conda are not written for it
[[ -z $modules ]] || find_module 2>/dev/null ||
    fail "there is no module command to load '$modules': set MODULES= to load none"
for name in $modules; do
    module load "$name" ||
        fail "module load $name failed (MACHINE is $MACHINE): see 'module avail', set MODULES"
done
if [[ -n ${CONDA_ENV:-} ]]; then
    find_conda 2>/dev/null || fail "CONDA_ENV is $CONDA_ENV, but there is no conda: set" \
        "CONDA_BASE to what 'conda info --base' prints, or PYTHON to the environment's python"
    conda activate "$CONDA_ENV" ||
        fail "conda activate $CONDA_ENV failed: 'conda env list' prints the names and paths to give"
fi
set -u

# The libraries of the cpe that was loaded, which is not the default one.
[[ -z ${CRAY_LD_LIBRARY_PATH:-} ]] ||
    export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# RCCL's network; nothing else of RCCL is set: OLCF finds its own choices the best.
[[ -z ${NCCL_NET:=$net} ]] || export NCCL_NET
for address in $(hostname -i 2>/dev/null) $(hostname -I 2>/dev/null) "$(uname -n)"; do
    [[ $address == 127.* || $address == *:* ]] || break # of no use to other nodes; IPv6
done
# Rank 0 runs on the first node, as this shell does. An address, because node names may not resolve.
export MASTER_ADDR=${MASTER_ADDR:-$address}
# Where rank 0 listens for the others.
export MASTER_PORT=$port
# For saving and --cpu-offload; loader processes (at most cores - 1) use one thread each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}
# No MIOpen cache folders: patches are embedded by a linear layer, nothing here is a convolution.

# Every flag on the srun line, which inherits hardly any of sbatch's. Never torchrun: it would put
# all ranks of a node on one core. -K1: a dead rank ends the step, or the others wait for it.
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "there is no $python: set PYTHON, or CONDA_ENV"
each_rank() {
    srun -N"$nodes" -n"$((nodes * tasks))" -c"$cores" "${gpu[@]}" -K1 "$python" -u "$@"
}
each_node() { srun -N"$nodes" -n"$nodes" --ntasks-per-node=1 -c"$((tasks * cores))" -K1 "$@"; }

# ---- a packed environment (conda-pack) on the nodes' own disks: imports take seconds, not minutes

env=$nvme/env-$SLURM_JOB_ID
stage() {
    sbcast -pf "$ENV_TARBALL" "$env.tar.gz" || return
    # The lock is for nodes that share the folder, or a second job on this one.
    # shellcheck disable=SC2016 # $1 is for the shell on the node
    each_node bash -euc 'exec 9>"$1.lock"; flock 9; [[ ! -e $1/unpacked ]] || exit 0; mkdir -p "$1"
        tar -I "$(command -v pigz || echo gzip)" -xf "$1.tar.gz" -C "$1"
        "$1/bin/python" "$1/bin/conda-unpack"; touch "$1/unpacked"' _ "$env"
}
unstage() { each_node rm -rf "$env" "$env.tar.gz" "$env.lock" || true; }
if [[ -n ${ENV_TARBALL:-} ]]; then
    if stage; then
        python=$env/bin/python
        say "environment: $ENV_TARBALL, unpacked in $env on each node"
    else
        say "warning: $ENV_TARBALL was not staged to $nvme (full? sbatch -C nvme?): using $python"
        unstage
    fi
fi

# ---- pre-flight check: a minute that may save node-hours

if [[ ${PREFLIGHT:-yes} == yes ]]; then
    if [[ $MACHINE == frontier && ${NCCL_NET} == OFI && -z ${NCCL_NET_PLUGIN:-} ]]; then
        libraries=$(IFS=: && for dir in ${LD_LIBRARY_PATH:-}; do ls "$dir"; done 2>/dev/null) || :
        [[ $libraries == *ccl-net*.so* ]] ||
            fail "no plugin librccl-net.so for RCCL: load rccl-net-plugin, or set NCCL_NET=Socket"
    fi
    "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' ||
        fail "$(command -v "$python") has no torch: set PYTHON, or CONDA_ENV"
    # One process simulates rank 0: flags, images, memory. Refused flags (2) and a plan that says NO
    # to the memory (3) end the job here.
    status=0
    LOCAL_WORLD_SIZE=$tasks srun -N1 -n1 -c"$cores" "${gpu[@]}" "$python" -u \
        train_fsdp.py "${device[@]}" "$@" --dry-run --world-size "$((nodes * tasks))" || status=$?
    ((status != 2)) || exit 2
    ((status != 3)) || fail "by its plan the run does not fit (PREFLIGHT=no starts it)"
    ((status == 0)) || say "warning: the dry run ended with status $status; trying the ranks"
    # Then all ranks report where they run and time a small all-gather.
    each_rank -m runtime.topology "${device[@]}" "$@" ||
        fail "the pre-flight check of the ranks failed (PREFLIGHT=no skips it)"
fi

# ---- rounds: one run over as many jobs as it takes

# OUT/.rounds: the first job, the newest checkpoint when this round began, rounds without a new one.
# This round counts as one until it has saved: rounds that a failing node ends count too.
newest() { if [[ -f $out/latest ]]; then cat "$out/latest"; else echo none; fi; }
mkdir -p "$out" || fail "cannot write to $out: give --out another folder"
first=${FIRST_JOB:-$SLURM_JOB_ID} job='' before='' idle=0
[[ ! -f $out/.rounds ]] || read -r job before idle <"$out/.rounds" || true
[[ $job == "$first" && $before == "$(newest)" ]] || idle=0
before=$(newest)
stuck="two rounds without a new checkpoint: not requeued; use a longer -t, or --save-every none"
((idle < 2)) || fail "$stuck"
echo "$first $before $((++idle))" >"$out/.rounds"

say "job $SLURM_JOB_ID: $nodes x $tasks ranks, newest checkpoint $before"
status=0
each_rank train_fsdp.py "${device[@]}" "$@" || status=$?
[[ $python != "$env"/* ]] || unstage
if ((status)); then
    say "error: the run ended with status $status: not requeued" >&2
    exit "$status"
fi
[[ $run == real && ! -e $out/done ]] || { say "finished"; exit 0; }

# Stopped by the signal: the ranks exit with 0 then too; only OUT shows what is left to do.
[[ $(newest) == "$before" ]] || idle=0
echo "$first $(newest) $idle" >"$out/.rounds"
((idle < 2)) || fail "$stuck"
[[ ${SLURM_JOB_QOS:-} != debug ]] || AGAIN=no # chains are not allowed there
case $AGAIN in
    requeue)
        say "newest checkpoint $(newest): requeued"
        scontrol requeue "$SLURM_JOB_ID" || fail "requeue was refused: AGAIN=chain, or submit again"
        ;;
    chain)
        options=(-J "$SLURM_JOB_NAME" -N "$nodes")
        if [[ $MACHINE == slurm ]]; then
            options+=(--mincpus="$SLURM_CPUS_ON_NODE")
            [[ -z ${SLURM_MEM_PER_NODE:-} ]] || options+=(--mem="$SLURM_MEM_PER_NODE")
            [[ $shared != NO ]] || options+=(--exclusive)
            [[ $gres == *gpu* ]] || gres=${gpus:+gpu:$gpus}
            [[ -z $gres ]] || options+=(--gres="$gres")
        fi
        read -r -a asked < <(squeue -hj "$SLURM_JOB_ID" -o '-A %a -p %P -q %q -t %l -C %f')
        for ((i = 0; i < ${#asked[@]}; i += 2)); do
            [[ ${asked[i + 1]} == *null* ]] || options+=("${asked[@]:i:2}")
        done
        say "newest checkpoint $(newest): the next job is"
        # The next job has another first node.
        FIRST_JOB=$first env -u MASTER_ADDR \
            sbatch -d "afterany:$SLURM_JOB_ID" "${options[@]}" "$0" "$@"
        ;;
    no) say "newest checkpoint $(newest), not done: submit the same command again to resume" ;;
esac
