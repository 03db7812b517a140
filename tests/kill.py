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

from ranks import environment, free_port, processes_of, read_log  # noqa: E402

import checkpoint  # noqa: E402

ARGV = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 12 "
    "--steps 100000 --log-every 1 --save-every 3 --precision fp32 --device cpu --workers 1 "
    "--clip 1 --blr 1e-2 --timeout 12"
).split()
MODES = ["ddp", "zero1"] + [
    f"{mode} --fsdp {fsdp}"
    for fsdp in (1, 2)
    for mode in ("no_shard", "shard_grad_op", "full_shard", "hybrid --group 1")
]


def all_steps(out: Path) -> list[dict]:
    """The step lines of all rounds; those before the first checkpoint have logs of their own."""
    return [step for log in out.glob("log*.jsonl") for step in read_log(log)[1]]


def strike(ranks: list[subprocess.Popen], name: str, hit: list[subprocess.Popen]) -> str:
    """Send the signal, wait for the end; what was wrong about it, or nothing."""
    early = [p.returncode for p in ranks if p.poll() is not None]
    if early:
        return f"ended by itself, status {early}"
    for p in hit:
        p.send_signal(getattr(signal, name))
    deadline = time.monotonic() + 90
    while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = [p.poll() for p in ranks]
    if None in status or (name != "SIGKILL" and any(status)):
        return f"status {status}"
    return ""


def one_round(out: Path, choose: random.Random) -> list[str]:
    """Start ranks, strike them, look at what is left; what was wrong."""
    world, mode = choose.choice([1, 2, 3, 4]), choose.choice(MODES)
    behind = choose.choice([[], ["--async-save"]])
    command = [sys.executable, "train_fsdp.py", *ARGV, "--mode", *mode.split(), *behind]
    begin = len(all_steps(out))
    known, port = bool(checkpoint.list_checkpoints(out)), free_port()
    with open(out / "output.txt", "ab") as output:
        ranks = [
            subprocess.Popen(
                [*command, "--out", str(out)],
                cwd=ROOT,
                stdout=output,
                env=environment(rank, world, port),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(world)
        ]
    if choose.random() < 0.2:
        moment = "start-up"
        time.sleep(choose.uniform(0.5, 8))
    else:
        moment, deadline = "training", time.monotonic() + 90
        while time.monotonic() < deadline and all(p.poll() is None for p in ranks):
            if len(all_steps(out)) > begin:
                break
            time.sleep(0.1)
        time.sleep(choose.uniform(0, 3))
    name = choose.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGUSR1"])
    hit = choose.choice([ranks, [choose.choice(ranks)]])
    what = f"{world} ranks, {mode}, {name} to {len(hit)} in {moment}"
    problems = [problem] if (problem := strike(ranks, name, hit)) else []
    grace = time.monotonic() + 30  # loader workers end a moment after their rank
    while any(processes_of(p.pid) for p in ranks) and time.monotonic() < grace:
        time.sleep(0.1)
    for p in ranks:
        if left := processes_of(p.pid):
            problems.append(f"processes left: {left}")
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    found = checkpoint.list_checkpoints(out)
    if not known <= len(found) <= 3 or len(list(out.glob(".step_*"))) > 1:
        problems.append(f"found {sorted(p.name for p in out.iterdir())}")
    for path in found:
        try:
            checkpoint.check(path)
        except checkpoint.Damaged as error:
            problems.append(str(error))
    print(what, [p.name for p in found], problems or "", flush=True)
    return [f"{what}: {problem}" for problem in problems]


def kill(rounds: int, seed: int, out: Path) -> list[str]:
    """So many rounds in one folder; what was wrong."""
    choose = random.Random(seed)
    problems = [problem for _ in range(rounds) for problem in one_round(out, choose)]
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
            print((Path(folder) / "output.txt").read_text()[-4000:])
    print(f"{args.rounds} rounds, {len(problems)} problems", *problems, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
