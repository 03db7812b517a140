"""Kill a run at random moments, start it again on other ranks in another mode, and count losses.

    python tests/kill.py --rounds 100

Each round trains until one or all ranks get SIGKILL, SIGTERM or SIGUSR1 at a random moment. It must
end, leave a whole checkpoint, no process and no pile of folders; and in the end each step must have
one answer, however often it was trained. Ranks that wait for a killed one are ended after a while,
as torchrun and srun -K1 do at once, and counted.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import environment, free_port, processes_of, read_log  # noqa: E402

import checkpoint  # noqa: E402

ARGV = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 12 "
    "--steps 100000 --log-every 1 --save-every 3 --precision fp32 --device cpu --workers 1 "
    "--clip 1 --blr 1e-2"
).split()
MODES = ["ddp", "zero1"] + [
    f"{mode} --fsdp {fsdp}"
    for fsdp in (1, 2)
    for mode in ("no_shard", "shard_grad_op", "full_shard", "hybrid --group 1")
]


@dataclass
class Report:
    """What went wrong, and how far it got."""

    rounds: int = 0
    last_step: int = 0
    repeated: int = 0  # step lines written more than once
    waited: int = 0  # rounds in which ranks waited for a killed one
    worst: float = 0.0  # relative difference between answers to one step
    problems: list[str] = field(default_factory=list)


def one_round(out: Path, choose: random.Random, report: Report) -> None:
    world, mode = choose.choice([1, 2, 3, 4]), choose.choice(MODES)
    port = free_port()
    command = [sys.executable, "train_fsdp.py", *ARGV, "--mode", *mode.split(), "--out", str(out)]
    with open(out / "output.txt", "a") as output:
        ranks = [
            subprocess.Popen(command, cwd=ROOT, env=environment(rank, world, port), stdout=output,
                             stderr=subprocess.STDOUT, start_new_session=True)
            for rank in range(world)
        ]  # fmt: skip
    begin = read_log(out / "log.jsonl")[1] if (out / "log.jsonl").exists() else []
    started = time.monotonic()
    while time.monotonic() - started < 90:  # until it trains, then a random moment more
        if (out / "log.jsonl").exists() and len(read_log(out / "log.jsonl")[1]) > len(begin):
            break
        if any(p.poll() is not None for p in ranks):
            break
        time.sleep(0.1)
    time.sleep(choose.uniform(0, 3))
    name = choose.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGUSR1"])
    hit = choose.choice([ranks, [choose.choice(ranks)]])
    what = f"round {report.rounds}: {world} ranks, {mode}, {name} to {len(hit)}"
    early = [p.returncode for p in ranks if p.poll() is not None]
    if early:
        report.problems.append(f"{what}: ended by itself, status {early}")
    for p in hit:
        if p.poll() is None:
            p.send_signal(getattr(signal, name))
    deadline = time.monotonic() + (10 if name == "SIGKILL" else 60)
    while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = [p.poll() for p in ranks]
    if None in status:
        report.waited += 1
        if name != "SIGKILL":
            report.problems.append(f"{what}: ranks left hanging, status {status}")
        for p in ranks:
            p.kill()
            p.wait()
    if name != "SIGKILL" and not early and any(s != 0 for s in status):
        report.problems.append(f"{what}: status {status}")
    grace = time.monotonic() + 10  # loader workers end a moment after their rank
    while any(processes_of(p.pid) for p in ranks) and time.monotonic() < grace:
        time.sleep(0.1)
    for p in ranks:
        if left := processes_of(p.pid):
            report.problems.append(f"{what}: processes left: {left}")
            os.killpg(p.pid, signal.SIGKILL)
    found = checkpoint.complete(out)
    if not 1 <= len(found) <= 3:
        report.problems.append(f"{what}: {len(found)} checkpoints")
    for path in found:
        try:
            checkpoint.verify(path)
        except checkpoint.Damaged as error:
            report.problems.append(f"{what}: {error}")
    if len(list(out.glob(".step_*"))) > 1:
        report.problems.append(f"{what}: temporary folders pile up")


def kill(rounds: int, seed: int, out: Path) -> Report:
    """So many rounds in one folder."""
    report, choose, known = Report(), random.Random(seed), 0
    for report.rounds in range(1, rounds + 1):
        one_round(out, choose, report)
        names = [p.name for p in checkpoint.complete(out)]
        print(f"round {report.rounds}: {names} {report.problems[known:] or ''}", flush=True)
        known = len(report.problems)
    answers: dict[int, list[float]] = {}
    for step in read_log(out / "log.jsonl")[1]:
        answers.setdefault(step["step"], []).append(step["loss"])
    report.last_step = max(answers)
    if sorted(answers) != list(range(1, report.last_step + 1)):
        report.problems.append("some step has no answer")
    for losses in answers.values():
        report.repeated += len(losses) - 1
        report.worst = max(report.worst, (max(losses) - min(losses)) / min(losses))
    if report.worst > 1e-5:
        report.problems.append(f"answers to one step differ by {report.worst:.1e}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run at random moments, and resume it.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = kill(args.rounds, args.seed, Path(folder))
        if report.problems:
            print((Path(folder) / "output.txt").read_text()[-4000:])
    print(report)
    return int(bool(report.problems))


if __name__ == "__main__":
    raise SystemExit(main())
