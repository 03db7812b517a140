"""Kill a run at random moments, start it again on other ranks in another mode, and count losses.

    python tests/kill.py --rounds 100

Each round trains until one or all ranks get SIGKILL, SIGTERM or SIGUSR1 at a random moment of
start-up, training or saving. It must end by itself, as if no launcher watched, and leave whole
checkpoints, no process and no pile of folders. In the end each step must have one answer, however
often it was trained.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import environment, free_port, processes_of, read_records  # noqa: E402

import checkpoint  # noqa: E402

ARGV = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 12 "
    "--steps 100000 --log-every 1 --save-every 3 --precision fp32 --device cpu --workers 1 "
    "--clip 1 --blr 1e-2 --timeout 16"
).split()
SHARDED = ("no_shard", "shard_grad_op", "full_shard", "hybrid --group 1")
MODES = ["ddp", "zero1"]
MODES += [f"{mode} --fsdp 1" for mode in SHARDED]
MODES += [f"{mode} --fsdp 2" for mode in SHARDED]


def all_steps(out: Path) -> list[dict]:
    """The step lines of all rounds; those before the first checkpoint have logs of their own."""
    found = []
    for log in out.glob("log*.jsonl"):
        found += read_records(log, "step")
    return found


def strike(ranks: list[subprocess.Popen], name: str, hit: list[subprocess.Popen]) -> list[str]:
    """Send the signal, wait for the end; return what was wrong about it."""
    early = [p.returncode for p in ranks if p.poll() is not None]
    if early:
        return [f"ended by itself, status {early}"]
    for p in hit:
        p.send_signal(getattr(signal, name))
    deadline = time.monotonic() + 90
    while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = [p.poll() for p in ranks]
    if None in status or (name != "SIGKILL" and any(status)):
        return [f"status {status}"]
    return []


def start(out: Path, world: int, flags: list[str]) -> list[subprocess.Popen]:
    """Start ranks that append what they print to OUT/output.txt."""
    command = [sys.executable, "train_fsdp.py", *ARGV, *flags, "--out", str(out)]
    port = free_port()
    ranks = []
    with open(out / "output.txt", "ab") as output:
        for rank in range(world):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                env=environment(rank, world, port),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ranks.append(process)
    return ranks


def processes_left(ranks: list[subprocess.Popen]) -> list[str]:
    """Wait until the ranks and their workers are gone; kill and return those that are not."""
    grace = time.monotonic() + 30  # loader workers end a moment after their rank
    while any(processes_of(p.pid) for p in ranks) and time.monotonic() < grace:
        time.sleep(0.1)
    found = []
    for p in ranks:
        left = processes_of(p.pid)
        if left:
            found += left
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    return found


def wrong_checkpoints(out: Path, fewest: int) -> list[str]:
    """Return what is wrong about the checkpoints in a folder, of which at least so many remain."""
    problems = []
    found = checkpoint.list_checkpoints(out)
    unfinished = list(out.glob(".step_*"))
    if not fewest <= len(found) <= 3 or len(unfinished) > 1:
        problems.append(f"found {sorted(p.name for p in out.iterdir())}")
    for path in found:
        try:
            checkpoint.verify(path)
        except checkpoint.CorruptCheckpointError as error:
            problems.append(str(error))
    return problems


def one_round(out: Path, choose: random.Random) -> list[str]:
    """Start ranks, strike them, look at what is left; what was wrong."""
    world = choose.choice([1, 2, 3, 4])
    mode = choose.choice(MODES)
    begin = len(all_steps(out))
    fewest = min(1, len(checkpoint.list_checkpoints(out)))
    ranks = start(out, world, ["--mode", *mode.split()])
    if choose.random() < 0.2:
        moment = "start-up"
        time.sleep(choose.uniform(0.5, 8))
    else:
        moment = "training"
        deadline = time.monotonic() + 90
        while len(all_steps(out)) <= begin and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(choose.uniform(0, 3))
    name = choose.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGUSR1"])
    hit = choose.choice([ranks, [choose.choice(ranks)]])
    what = f"{world} ranks, {mode}, {name} to {len(hit)} in {moment}"

    problems = strike(ranks, name, hit)
    left = processes_left(ranks)
    if left:
        problems.append(f"processes left: {left}")
    problems += wrong_checkpoints(out, fewest)
    print(what, [p.name for p in checkpoint.list_checkpoints(out)], problems, flush=True)
    return [f"{what}: {problem}" for problem in problems]


def kill(rounds: int, seed: int, out: Path) -> list[str]:
    """So many rounds in one folder; what was wrong."""
    choose = random.Random(seed)
    problems = []
    for _ in range(rounds):
        problems += one_round(out, choose)
    answers = defaultdict(list)
    for step in all_steps(out):
        answers[step["step"]].append(step["loss"])
    if sorted(answers) != list(range(1, len(answers) + 1)) or not answers:
        problems.append(f"steps with an answer: {sorted(answers)}")
    for step, losses in answers.items():
        if (max(losses) - min(losses)) / min(losses) > 1e-5:
            problems.append(f"answers to step {step}: {losses}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run at random moments, and resume it.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = kill(args.rounds, args.seed, Path(folder))
        if problems:
            output = Path(folder, "output.txt").read_text()
            print(output[-4000:])
    print(f"{args.rounds} rounds, {len(problems)} problems", *problems, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
