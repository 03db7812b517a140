"""Run train_fsdp.main on several gloo ranks, many runs in one set of processes, and look inside.

    results = run_ranks(4, [Run(["--mode", "full_shard", ...])], folder)

The processes are started once (importing torch is what takes long); each run gets a process group
of its own. `python tests/ranks.py ...` is what the processes themselves execute.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Run:
    """One call of train_fsdp.main on all ranks."""

    argv: list[str]
    poison: str = ""  # "loss" or "gradient": make it non-finite ...
    poison_rank: int = 0  # ... on this rank
    poison_step: int = 0  # ... in this step, from 0
    params: bool = True  # gather the parameters at every step, compare replicas, keep the last


@dataclass
class Result:
    """What came of it."""

    status: list[int]  # of main, by rank
    start: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    replicas_differ: float = 0.0  # the largest difference over all steps
    params: dict[str, Any] = field(default_factory=dict)  # after the last step
    errors: str = ""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set; none of a surrounding Slurm or torchrun."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC"))}
    return clean | {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def run_ranks(world: int, runs: list[Run], folder: Path, timeout: float = 600) -> list[Result]:
    """Execute the runs one after another on `world` processes; RuntimeError if they do not end."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [asdict(run) | {"port": free_port(), "out": f"{folder}/{i}"} for i, run in enumerate(runs)]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    processes = []
    for rank in range(world):
        with open(folder / f"rank{rank}.txt", "w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(folder)],
                    env=environment(rank, world, 0), stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, cwd=ROOT,
                )
            )  # fmt: skip
    deadline = time.monotonic() + timeout
    try:
        while any(p.poll() is None for p in processes):
            failed = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                time.sleep(2)  # let the others print
                texts = [(folder / f"rank{r}.txt").read_text()[-3000:] for r in failed or [0]]
                raise RuntimeError(f"ranks {failed} failed or time was up:\n" + "\n".join(texts))
            time.sleep(0.05)
    finally:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    return [read_result(Path(str(job["out"])), world) for job in jobs]


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """(start, steps, end) of a log.jsonl; strict JSON, so NaN is an error."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    by = {event: [r for r in lines if r["event"] == event] for event in ("start", "step", "end")}
    return (by["start"] or [{}])[-1], by["step"], (by["end"] or [{}])[-1]


def read_result(out: Path, world: int) -> Result:
    status = [int((out / f"status{rank}").read_text()) for rank in range(world)]
    result = Result(status, errors=(out / "errors").read_text())
    if (out / "log.jsonl").exists():
        result.start, result.steps, result.end = read_log(out / "log.jsonl")
    if (out / "params.pickle").exists():
        result.params = pickle.loads((out / "params.pickle").read_bytes())
        result.replicas_differ = result.params.pop("replicas_differ")
    return result


# --------------------------------------------------------------------------------------------- #
# Inside a rank


def full_parameters(model):  # noqa: ANN001, ANN201
    """Every parameter whole, by its original name, as this rank's shard group holds it."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.tensor import DTensor

    import shard

    def values():  # noqa: ANN202
        return {
            shard.original_name(n): (p.full_tensor() if isinstance(p, DTensor) else p)
            .detach().cpu().clone()
            for n, p in model.named_parameters()
        }  # fmt: skip

    if isinstance(model, FSDP1):
        with FSDP1.summon_full_params(model, writeback=False):
            return values()
    return values()


def worker(folder: Path) -> None:
    import contextlib
    import io

    import torch
    import torch.distributed as dist

    import data
    import train_fsdp
    import vit

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    original = (train_fsdp.train_step, data.normalize, vit.ViTMAE.forward)
    for job in json.loads((folder / "jobs.json").read_text()):
        out = Path(job["out"])
        out.mkdir(exist_ok=True)
        os.environ["MASTER_PORT"] = str(job["port"])
        train_fsdp.train_step, data.normalize, vit.ViTMAE.forward = original
        poisoned = job["poison"] and job["poison_rank"] == rank
        state = {"step": -1, "differ": 0.0, "params": {}}

        def train_step(model, *args, step, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
            state["step"] = step
            result = original[0](model, *args, step=step, **kwargs)
            if job["params"]:
                state["params"] = full_parameters(model)
                mine = torch.cat([v.flatten() for v in state["params"].values()])
                low, high = mine.clone(), mine.clone()
                dist.all_reduce(low, op=dist.ReduceOp.MIN)
                dist.all_reduce(high, op=dist.ReduceOp.MAX)
                state["differ"] = max(state["differ"], (high - low).max().item())
            return result

        def normalize(images):  # noqa: ANN001, ANN202
            x = original[1](images)
            return x * float("nan") if state["step"] == job["poison_step"] else x

        def forward(self, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
            loss, pred, mask = original[2](self, *args, **kwargs)
            if state["step"] == job["poison_step"]:
                loss.register_hook(lambda g: g * float("inf"))
            return loss, pred, mask

        train_fsdp.train_step = train_step
        if poisoned and job["poison"] == "loss":
            data.normalize = normalize
        if poisoned and job["poison"] == "gradient":
            vit.ViTMAE.forward = forward
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            try:
                status = train_fsdp.main([*job["argv"], "--out", str(out)])
            except SystemExit as leave:
                status = int(leave.code or 0)
        sys.stderr.write(errors.getvalue())
        (out / f"status{rank}").write_text(str(status))
        if rank == 0:
            (out / "errors").write_text(errors.getvalue())
            if state["params"]:
                kept = state["params"] | {"replicas_differ": state["differ"]}
                (out / "params.pickle").write_bytes(pickle.dumps(kept))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
