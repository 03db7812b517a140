#!/bin/bash
# Take a run from sbatch to its last step, on any Slurm cluster. All arguments go to train_fsdp.py.
#
#   sbatch -A PROJECT launch_frontier.sh --model 3b --mode hybrid --group 2 --data DIR --out OUT
#   CONDA_ENV=NAME sbatch -A ACCOUNT -p PARTITION -N 2 --exclusive --gpus-per-node=4 \
#       launch_frontier.sh ...
#
# The first is for Frontier, the second for any other cluster with NVIDIA or AMD GPUs. Submit from
# the folder of the scripts. What appears below as NAME:-default is a variable that you can set
# before sbatch; docs/cluster.md explains each of them.
#SBATCH -J vit-mae
#SBATCH -N 2
#SBATCH -t 2:00:00
#SBATCH -o %x-%j.out
# A long run takes several rounds of this job, which all append to one output file.
#SBATCH --open-mode=append
#SBATCH --requeue
# This signals the ranks, not this shell, 5 minutes before the time limit: they save and exit with
# status 0.
#SBATCH --signal=USR1@300
# Frontier's network, Slingshot, needs this together with the module rccl-net-plugin below.
#SBATCH --network=disable_rdzv_get
set -euo pipefail

say() { echo "launch_frontier.sh: $*"; }
fail() { say "error: $*" >&2; exit 1; }

[[ -n ${SLURM_JOB_ID:-} ]] || fail "not in a Slurm job: sbatch -A PROJECT launch_frontier.sh ..."
cd "${SCRIPTS:-$SLURM_SUBMIT_DIR}" # Slurm runs a copy of this file from another folder
[[ -f train_fsdp.py ]] || fail "no train_fsdp.py in $PWD: submit from its folder, or set SCRIPTS"

out=out run=real last=
for word in "$@"; do # this script needs to know two of the flags itself
    case $last in --out) out=$word ;; --run | --run-mode) run=$word ;; esac
    case $word in --out=*) out=${word#*=} ;; --run=* | --run-mode=*) run=${word#*=} ;; esac
    last=$word
done
out=${out/#\~\//$HOME/} # as train_fsdp.py does: bash expands no ~ after --out=

# ---- the machine
# With this flag a rank without a GPU is an error, not a CPU run. A --device in "$@" comes later, so
# it wins.
device=(--device cuda)
nodes=$SLURM_JOB_NUM_NODES
if [[ -z ${MACHINE:-} ]]; then
    MACHINE=slurm
    [[ ${LMOD_SYSTEM_NAME:-${SLURM_CLUSTER_NAME:-}} != frontier ]] || MACHINE=frontier
fi
case $MACHINE in
    frontier)
        # One rank per GCD, on the cores of the L3 region next to it: 7 of the 8 are free.
        tasks=${TASKS_PER_NODE:-8} cores=${CPUS_PER_TASK:-7} port=${MASTER_PORT:-3442}
        gpu=(--gpus-per-task=1 --gpu-bind="${GPU_BIND:-closest}")
        nvme=${NVME_DIR:-/mnt/bb/$(id -un)}
        # OLCF's list. The order matters: plugin and target depend on the ROCm that is loaded.
        modules="PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 rccl-net-plugin"
        modules=${MODULES-$modules craype-accel-amd-gfx90a}
        # OFI makes a missing plugin an error; otherwise RCCL would use TCP, which is very slow. On
        # one node the plugin has no network to start on.
        if ((nodes > 1)); then net=OFI; else net=Socket; fi
        ;;
    slurm)
        tasks=${TASKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
        if [[ -z ${SLURM_GPUS_ON_NODE:-} ]]; then
            device=()
            say "warning: no GPU in this job, so it runs on CPUs: --gpus-per-node=N or --gres=gpu:N"
        fi
        cores=${CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / tasks))}
        ((cores)) || fail "the job has $SLURM_CPUS_ON_NODE CPUs per node for $tasks ranks:" \
            "give sbatch --exclusive, or --cpus-per-gpu=8"
        # NCCL copies directly between GPUs only if a rank sees all GPUs of the job on its node.
        # srun shows a rank all of them, unless sbatch's flags reach it through these variables.
        unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU
        unset SLURM_TRES_PER_TASK # how newer versions of Slurm hand on --gpus-per-task
        gpu=(${GPU_BIND:+--gpus-per-task=1 --gpu-bind="$GPU_BIND"})
        port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # jobs may share a node
        nvme=${NVME_DIR:-${TMPDIR:-/tmp}} modules=${MODULES-} net=
        ;;
    *) fail "MACHINE is $MACHINE, but must be frontier or slurm" ;;
esac
say "MACHINE is $MACHINE: $nodes x $tasks ranks, $cores CPUs each"

set +u # Lmod and conda read variables that are not set
# shellcheck disable=SC1091 # a file of Lmod, or of Environment Modules
[[ -z $modules || $(type -t module) ]] || . "${MODULESHOME:-}/init/bash" 2>/dev/null ||
    fail "there is no module command to load '$modules': set MODULES= to load none"
for name in $modules; do
    module load "$name" ||
        fail "module load $name failed (MACHINE is $MACHINE): see 'module avail', set MODULES"
done
if [[ -n ${CONDA_ENV:-} ]]; then
    # In a script `conda activate` needs this file to be read first. Login shells set CONDA_EXE.
    exe=${CONDA_EXE:-}
    # shellcheck disable=SC1091 # a file of conda
    [[ $(type -t conda) == function ]] || . "${CONDA_BASE:-${exe%/*/*}}/etc/profile.d/conda.sh" ||
        fail "CONDA_ENV is $CONDA_ENV, but there is no conda: set CONDA_BASE to what" \
            "'conda info --base' prints, or PYTHON to the environment's python"
    conda activate "$CONDA_ENV" ||
        fail "conda activate $CONDA_ENV failed: 'conda env list' prints the names and paths to give"
fi
set -u

# the libraries of the cpe that was loaded, not those of the default one
[[ -z ${CRAY_LD_LIBRARY_PATH:-} ]] ||
    export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# The network of RCCL. Nothing else of RCCL is set: OLCF found its own choices to be the best.
[[ -z ${NCCL_NET:=$net} ]] || export NCCL_NET
# Rank 0 listens on the first node, where this shell runs. Take the first of its addresses that other
# nodes can use: neither 127.* nor IPv6. The node's name comes last, because it may not resolve.
for address in $(hostname -i 2>/dev/null) $(hostname -I 2>/dev/null) "$(uname -n)"; do
    if [[ $address != 127.* && $address != *:* ]]; then break; fi
done
export MASTER_ADDR=${MASTER_ADDR:-$address} MASTER_PORT=$port
# These threads are for saving and --cpu-offload. Loader processes (at most cores - 1) use one each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}

# sbatch --export=LIST sets this; with it srun would give the ranks only the variables in that list
unset SLURM_EXPORT_ENV

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "there is no $python: set PYTHON, or CONDA_ENV"
each_node() { srun -N"$nodes" -n"$nodes" --ntasks-per-node=1 -c"$((tasks * cores))" -K1 "$@"; }

# ---- a packed environment (conda-pack) on the nodes' own disks: imports take seconds
env=$nvme/env-$SLURM_JOB_ID
stage() {
    sbcast -pf "$ENV_TARBALL" "$env.tar.gz" || return
    # The lock is for nodes that share the folder, and for a second job on the same node.
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

# ---- pre-flight check by plan.py: seconds that may save node-hours
if [[ ${PREFLIGHT:-yes} == yes ]]; then
    "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' ||
        fail "$(command -v "$python") has no torch: set PYTHON, or CONDA_ENV"
    # On a node of the job. Refused flags (2) and a run that does not fit (3) end the job here.
    status=0
    LOCAL_WORLD_SIZE=$tasks srun -N1 -n1 -c"$cores" "${gpu[@]}" "$python" -u \
        plan.py "${device[@]}" "$@" --world-size "$((nodes * tasks))" || status=$?
    ((status != 2)) || exit 2
    ((status != 3)) || fail "by its plan the run does not fit (PREFLIGHT=no starts it)"
    ((status == 0)) || say "warning: plan.py ended with status $status; starting the run"
fi

# ---- rounds: one run over as many jobs as it takes
# OUT/.rounds holds the job's number, the newest checkpoint when its last round began, and how many
# rounds made no new checkpoint. A round counts as one of these until the next round finds its
# checkpoint, so rounds that a failing node ends count too.
newest() { if [[ -f $out/latest ]]; then cat "$out/latest"; else echo none; fi; }
mkdir -p "$out" || fail "cannot write to $out: give --out another folder"
job='' before='' idle=0
[[ ! -f $out/.rounds ]] || read -r job before idle <"$out/.rounds" || true
[[ $job == "$SLURM_JOB_ID" && $before == "$(newest)" ]] || idle=0
((idle < 2)) || fail "two rounds without a new checkpoint: use a longer -t, or a smaller --batch"
echo "$SLURM_JOB_ID $(newest) $((idle + 1))" >"$out/.rounds"

say "job $SLURM_JOB_ID: $nodes x $tasks ranks, newest checkpoint $(newest)"
status=0
# srun is given every flag, because it inherits hardly any from sbatch. Do not start torchrun by it:
# that would put all ranks of a node on one core. With -K1 a dead rank ends the step; otherwise the
# other ranks would wait for it.
srun -N"$nodes" -n"$((nodes * tasks))" -c"$cores" "${gpu[@]}" -K1 "$python" -u \
    train_fsdp.py "${device[@]}" "$@" || status=$?
[[ $python != "$env"/* ]] || unstage
((status == 0)) || { say "error: the run ended with status $status" >&2; exit "$status"; }
[[ $run == real && ! -e $out/done ]] || { say "finished"; exit 0; }

# The signal has stopped the ranks. They exit with 0 then too, so only OUT shows what is left to do.
if [[ ${AGAIN:-requeue} == no || ${SLURM_JOB_QOS:-} == debug ]]; then
    say "newest checkpoint $(newest), not done: submit the same command again to resume"
else
    say "newest checkpoint $(newest): requeued"
    scontrol requeue "$SLURM_JOB_ID" || fail "requeue was refused: submit the same command again"
fi
