"""Kill a run at random moments, start it again on other ranks in another mode, and count losses.

    python tests/kill.py --rounds 100

Each round trains until one or all ranks get SIGKILL, SIGTERM, SIGUSR1 or SIGSTOP at a random moment
of start-up, training or saving. It must end by itself, as if no launcher watched, and leave whole
checkpoints, no process and no pile of folders; a job that is stopped as a whole must go on. In the
end each step must have one answer, however often it was trained.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import environment, free_port, processes_of, read_log  # noqa: E402

import checkpoint  # noqa: E402

TIMEOUT = 12  # seconds; four times as long in start-up
ARGV = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 12 "
    "--steps 100000 --log-every 1 --save-every 3 --precision fp32 --device cpu --workers 1 "
    f"--clip 1 --blr 1e-2 --timeout {TIMEOUT}"
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
    kinds: Counter[str] = field(default_factory=Counter)  # what the rounds got
    worst: float = 0.0  # relative difference between answers to one step
    problems: list[str] = field(default_factory=list)


def ended(ranks: list[subprocess.Popen], seconds: float) -> list[int | None]:
    """The statuses once all have left or time is up."""
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [p.poll() for p in ranks]


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
    if name == "SIGSTOP":
        if len(hit) < len(ranks):
            status = ended([p for p in ranks if p not in hit], 4 * TIMEOUT + 60)
            for p in hit:
                p.send_signal(signal.SIGCONT)
            # stopped before it met the others, it now looks for them as long as they did
            if any(s != 1 for s in status + ended(hit, 4 * TIMEOUT + 60)):
                return f"status {status}, then {[p.poll() for p in hit]}"
            return ""
        time.sleep(TIMEOUT + 4)
        for p in hit:
            p.send_signal(signal.SIGCONT)
        time.sleep(2)
        status = [p.poll() for p in ranks]
        if any(s is not None for s in status):
            return f"did not outlive a stop of all, status {status}"
        ranks[0].send_signal(signal.SIGTERM)
    status = ended(ranks, 90)
    if None in status:
        return f"ranks left hanging, status {status}"
    if name != "SIGKILL" and any(s != 0 for s in status):
        return f"status {status}"
    return ""


def one_round(out: Path, choose: random.Random, report: Report) -> None:
    """Start ranks, strike them, look at what is left."""
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
    name = choose.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGUSR1", "SIGSTOP"])
    hit = choose.choice([ranks, [choose.choice(ranks)]])
    kind = f"{name} to {'all' if len(hit) == world else 'one'} in {moment}"
    report.kinds[kind] += 1
    what = f"round {report.rounds}: {world} ranks, {mode} {' '.join(behind)}, {kind}"
    if problem := strike(ranks, name, hit):
        report.problems.append(f"{what}: {problem}")
    grace = time.monotonic() + 30  # loader workers end a moment after their rank
    while any(processes_of(p.pid) for p in ranks) and time.monotonic() < grace:
        time.sleep(0.1)
    for p in ranks:
        if left := processes_of(p.pid):
            report.problems.append(f"{what}: processes left: {left}")
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    found = checkpoint.list_checkpoints(out)
    if not known <= len(found) <= 3:
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
        names = [p.name for p in checkpoint.list_checkpoints(out)]
        print(f"round {report.rounds}: {names} {report.problems[known:] or ''}", flush=True)
        known = len(report.problems)
    answers: dict[int, list[float]] = {}
    for step in all_steps(out):
        answers.setdefault(step["step"], []).append(step["loss"])
    report.last_step = max(answers)
    if sorted(answers) != list(range(1, report.last_step + 1)):
        report.problems.append("some step has no answer")
    for losses in answers.values():
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
