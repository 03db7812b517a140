"""Prove that a training script trains the same in every mode: run it, change nothing in it.

    python verify.py train.py --batch {64/ranks}     # as it is: in one process, then on two ranks
    python verify.py own_model.py {mode} {group} --fsdp {fsdp} --precision fp32     # in every mode
    python verify.py --modes ddp,full_shard/1 --resume-after 2 own_model.py {mode} --fsdp {fsdp}

Compares what the optimizers see with what they see in one process: the gradients before each step,
then settings, parameters and buffers. The script needs the same global batch on any number of
ranks, no dropout, and fp32 for the exact tolerance. All runs are on the CPU; each has a folder of
its own, so a relative path in ARGS that exists where you stand is made absolute. In ARGS `{ranks}`
is the number of ranks, `{64/ranks}` a share of 64, `{mode}` the row's mode; `{fsdp}`, 1 or 2, has a
value in the modes of FSDP, `{group}`, 2, in the hybrid ones: elsewhere a flag in front of them is
left out with them, and alone they become an empty argument. Copy this one file.
"""

import argparse
import faulthandler
import gc
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what optimizers and FSDP import late is imported once for all ranks
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.optim
import torch.utils.data
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

SHARDED = ("no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op")
ROWS = ("ddp", "zero1", *SHARDED, *(f"{mode}/1" for mode in SHARDED))  # "/1": FSDP1
GROUP = 2
ALONE = "one process"
# Of the largest gradient of a step. Rounding makes 1e-6 in fp32, but where it turns one input of a
# ReLU from below zero to above, 1e-4. Then where a module computes in bf16 or fp16.
TOLERANCE = 1e-3
LOW_TOLERANCE = 5e-2

Values = dict[str, Tensor]  # by name: a whole value as a vector


# --- In a rank: record what its optimizers see


class Recorder:
    """Writes a file for each step of each optimizer, STEP.OPTIMIZER.RANK."""

    def __init__(self, folder: Path, rank: int, begin: int, last: int) -> None:
        self.folder = folder
        self.rank = rank
        self.begin = begin  # steps of each optimizer before a restart
        self.last = last  # the run is stopped before an optimizer makes another step
        self.made: dict[Optimizer, int] = {}  # steps, in the order of the first ones
        self.inner: set[Optimizer] = set()  # those inside of others, such as ZeRO-1's
        self.names: dict[int, str] = {}  # of the tensors of modules, by id
        self.untrained: Values = {}  # buffers and frozen parameters
        self.split: set[int] = set()  # ids of parameters of which FSDP1 has put a part here
        self.group: Any = None  # of the ranks that have the other parts
        self.record: dict[str, Any] = {}
        self.evaluated = False
        self.low_precision = False
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)
        nn.modules.module.register_module_forward_hook(self.after_forward)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            if not module.training or not torch.is_grad_enabled():
                self.evaluated = True
            if isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16):
                self.low_precision = True

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.inner |= {held for held in vars(optimizer).values() if isinstance(held, Optimizer)}
        callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
        # in _init_optim_state PyTorch takes a step of no size, to make an optimizer's states
        if optimizer in self.inner or "_init_optim_state" in callers:
            return
        if self.made.setdefault(optimizer, self.begin) >= self.last:
            self._wait_to_be_stopped()
        named = self._name_parameters(optimizer)
        # all ranks make a tensor whole together, so what has no gradient is not left out
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
        settings: set[str] = set()
        for group in optimizer.param_groups:
            settings |= {f"{key} {x:.6g}" for key, x in group.items() if isinstance(x, float)}
        self.record = {
            "start": self._make_whole(named, named),
            "gradient": self._make_whole(named, gradients),
            "buffer": self._make_whole(self.untrained, self.untrained),
            "settings": settings,
            "evaluated": self.evaluated,
            "low": self.low_precision,
            "eps": max(torch.finfo(p.dtype).eps for p in named.values()),
        }

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.record and optimizer not in self.inner:
            named = self._name_parameters(optimizer)
            start = self.record["start"]
            after = self._make_whole(named, named)
            self.record["change"] = {name: value - start[name] for name, value in after.items()}
            place = [*self.made].index(optimizer)
            torch.save(self.record, self.folder / f"{self.made[optimizer]}.{place}.{self.rank}")
            self.made[optimizer] += 1
            self.record = {}

    def _wait_to_be_stopped(self) -> None:
        """Wait for the other ranks: what follows the last step, such as a save, is done here."""
        (self.folder / f"stop.{self.rank}").touch()
        while True:
            time.sleep(60)

    def _name_parameters(self, optimizer: Optimizer) -> Values:
        """Return an optimizer's parameters by name; where no module has one, by place."""
        parameters: list[Tensor] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        self._search_modules({id(p) for p in parameters})
        names = [self.names.get(id(p), "parameter") for p in parameters]
        numbered = [n if names.count(n) == 1 else f"{n} {i}" for i, n in enumerate(names)]
        return dict(zip(numbered, parameters, strict=True))

    def _search_modules(self, wanted: set[int]) -> None:
        """Look at the tensors of all modules that have a parameter with one of these ids."""
        tensors: dict[int, Tensor] = {}
        self.names = {}
        for module in gc.get_objects():
            if not issubclass(type(module), nn.Module) or "_parameters" not in vars(module):
                continue
            parameters = [*module.named_parameters()]
            ids = {id(p) for _, p in parameters}
            if not wanted & ids:
                continue
            if isinstance(module, FSDP1) and module.sharding_strategy != ShardingStrategy.NO_SHARD:
                self.split |= ids
                self.group = module.process_group
            for name, tensor in [*parameters, *module.named_buffers()]:
                plain = _plain(name)
                if len(plain) >= len(self.names.get(id(tensor), "")):  # of the outermost module
                    self.names[id(tensor)] = plain
                    tensors[id(tensor)] = tensor
        self.untrained = {self.names[i]: t for i, t in tensors.items() if not t.requires_grad}

    def _make_whole(self, named: Values, values: Values) -> Values:
        """Copy values of parameters into vectors of at least fp32, each whole. Collective."""
        whole: Values = {}
        for name, value in values.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            dtype = torch.promote_types(value.dtype, torch.float32)
            whole[name] = full.detach().to(dtype, copy=True).flatten()
        parts = {name: whole[name] for name, p in named.items() if id(p) in self.split}
        if parts:
            gathered: list[Any] = [None] * self.group.size()
            dist.all_gather_object(gathered, parts, self.group)
            whole |= {name: torch.cat([each[name] for each in gathered]) for name in parts}
        for name, p in named.items():
            if isinstance(p, FlatParameter):
                whole |= _unflatten(p, name.removesuffix("_flat_param"), whole.pop(name))
        return whole


def _plain(name: str) -> str:
    """Return a name without what DDP, FSDP1, checkpointing and torch.compile put into it."""
    wrappers = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _unflatten(flat: Any, unit: str, value: Tensor) -> Values:
    """Return by name what FSDP1 with use_orig_params=False has put into one parameter."""
    sizes = flat._numels_with_padding  # this and what follows are private names
    pieces = value[: sum(sizes)].split(sizes)
    real = zip(pieces, flat._is_padding_mask, strict=True)
    values = [piece.clone() for piece, is_padding in real if not is_padding]
    return dict(zip([unit + _plain(name) for name in flat._fqns], values, strict=True))


# --- The ranks of a run: processes forked from this one, which has imported PyTorch already


@dataclass
class ScriptRun:
    """The script on some ranks, in a folder of its own."""

    script: Path
    words: list[str]  # its arguments
    ranks: int
    folder: Path
    timeout: float
    problem: str = ""

    def start(self, begin: int, last: int) -> str:
        """Run until an optimizer has made `last` steps; return what went wrong, if anything."""
        for name in ("records", "work"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("records/stop.*"):
            path.unlink()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            _, port = free.getsockname()
        fork = multiprocessing.get_context("fork")
        arguments = [(rank, port, begin, last) for rank in range(self.ranks)]
        processes: list[Any] = [
            fork.Process(target=self._become_rank, args=each) for each in arguments
        ]
        try:
            for process in processes:
                process.start()
            return self._wait(processes)
        finally:
            for process in processes:
                process.kill()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started, as a loader
                process.join()

    def records(self, step: int, place: int) -> list[Path]:
        """Return the files of a step of an optimizer, by rank."""
        return [self.folder / f"records/{step}.{place}.{rank}" for rank in range(self.ranks)]

    def steps(self) -> list[tuple[int, int]]:
        """List (step, optimizer)."""
        names = [path.name.split(".") for path in self.folder.glob("records/*.*.*")]
        return sorted({(int(step), int(place)) for step, place, _ in names})

    def _become_rank(self, rank: int, port: int, begin: int, last: int) -> None:
        """Run the script as torchrun would, where no GPU is visible."""
        os.setsid()
        # renews PyTorch's pool of threads, which does not survive a fork, before two threads of a
        # backward pass try to do so at once
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(self.folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        faulthandler.enable()  # writes the stack at SIGABRT
        os.environ.update({f"{name}_VISIBLE_DEVICES": "" for name in ("CUDA", "HIP", "ROCR")})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
        os.environ.update(WORLD_SIZE=str(self.ranks), LOCAL_WORLD_SIZE=str(self.ranks))
        # gloo would look up the computer's own name, which may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.chdir(self.folder / "work")
        random.seed()  # or all would draw what the process draws that they are forked from
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        gc.freeze = lambda: None  # type: ignore[assignment]  # would hide the script's modules
        sys.argv = [str(self.script), *self.words]
        sys.path[:1] = [str(self.script.parent), str(Path(__file__).resolve().parent)]
        Recorder(self.folder / "records", rank, begin, last)
        runpy.run_path(str(self.script), run_name="__main__")

    def _wait(self, processes: Sequence[Any]) -> str:
        """Wait until each rank has ended or made all steps; return what went wrong."""
        deadline = time.monotonic() + self.timeout
        waiting = [*range(self.ranks)]
        failed: dict[int, str] = {}
        while waiting and not failed and time.monotonic() < deadline:
            time.sleep(0.01)
            failed = {rank: self._error(rank, p) for rank, p in enumerate(processes) if p.exitcode}
            alive = [rank for rank in waiting if processes[rank].exitcode is None]
            waiting = [r for r in alive if not (self.folder / f"records/stop.{r}").exists()]
        if failed:
            # a rank whose neighbour has failed says that the connection is closed
            by_another = {r: "onnection" in error for r, error in failed.items()}
            return failed[min(failed, key=by_another.__getitem__)]
        for rank in waiting:
            os.kill(processes[rank].pid, signal.SIGABRT)
            processes[rank].join()
        if waiting:
            stack = self.folder / f"rank{waiting[0]}.txt"
            return f"rank {waiting[0]} hangs after {self.timeout:g} s (its stack: {stack})"
        return "" if self.steps() else f"no optimizer makes a step (see {self.folder})"

    def _error(self, rank: int, process: Any) -> str:
        output = self.folder / f"rank{rank}.txt"
        lines = output.read_text(errors="replace").split("\n")
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
        last = [f"exit status {process.exitcode}, by signal where below 0", *errors][-1]
        return f"{last[:200]} (rank {rank}; all of it: {output})"


# --- Compare what was recorded


class Differs(Exception):
    """What differs first, and a sentence about what that looks like, or none."""


REPLICAS = "the ranks have different parameters: give all one seed, and change them alike"
BUFFERS = "buffers differ, such as BatchNorm's, which each rank computes from its own images"
EVALUATION = "the steps are the same until the first evaluation, which must change nothing"
LOST = "no gradient: the optimizer was not built right after sharding, or a call passed the wrapper"
OF_EACH_RANK = "each rank has gradients of its own: they are not averaged, or changed afterwards"
SUMMED = "the gradients are multiplied by the number of ranks: summed instead of averaged"
DIVIDED = "the gradients are divided by the number of ranks once too often"
RESTART = "the steps are the same until the restart: not all was saved, or an older step was loaded"


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of each element; none where both are the same or not a number."""
    alike = (one == other) | (one.isnan() & other.isnan())
    return torch.where(alike, 0.0, (one - other).abs().double().nan_to_num(1e30, 1e30))


def largest(value: Tensor) -> float:
    """Return the largest absolute value that is finite."""
    return value.abs().nan_to_num(0, 0, 0).max().item() if len(value) else 0.0


def find_worst(found: list[Values], want: Values, bounds: dict[str, Any]) -> tuple[float, str, int]:
    """Return (times what is allowed, name, rank) of the largest distance."""
    worst = (0.0, "", 0)
    for name, value in want.items():
        for rank, values in enumerate(found):
            times = math.inf
            if name in values and values[name].shape == value.shape:
                times = largest(distance(values[name], value) / (bounds[name] + 1e-30))
            worst = max(worst, (times, name, rank))
    return worst


class Comparison:
    """The steps of an optimizer beside those in one process."""

    def __init__(self, start: Values, tolerance: float) -> None:
        self.tolerance = tolerance
        # AdamW's first steps are as large for a gradient of 1e-9 as for one of 1, and may have
        # either sign where a gradient is only rounding, as that of a key's bias. So the gradients
        # decide, and the change of a parameter must agree to 5 % only where they were clear.
        self.clear = {name: torch.ones_like(p, dtype=torch.bool) for name, p in start.items()}
        self.drift = {name: torch.zeros_like(p) for name, p in start.items()}  # that this allows
        self.apart = 0.0  # of gradients, as a part of the largest

    def check_step(self, want: dict[str, Any], got: list[dict[str, Any]]) -> None:
        """Raise Differs for what differs in a step."""
        start = want["start"]
        rounding = {name: 8 * want["eps"] * largest(p) for name, p in start.items()}
        bounds = {name: self.drift[name] + size for name, size in rounding.items()}
        found = [record["start"] for record in got]
        times, name, rank = find_worst(found, start, bounds)
        if times == math.inf:
            raise Differs(f"gradient of {name}: the optimizer does not hold it (rank {rank})", LOST)
        of_rank0 = {each: found[0][each] for each in start}
        unequal, other, at = find_worst(found, of_rank0, rounding)
        if unequal > 1:
            raise Differs(f"parameter {other} before it (rank {at})", REPLICAS)
        if times > 1:
            raise Differs(f"parameter {name} before it (rank {rank})", "")
        pattern = BUFFERS if self._compare_buffers(want, got) else ""
        self._check_gradients(want["gradient"], [record["gradient"] for record in got], pattern)
        for rank, record in enumerate(got):
            if record["settings"] != want["settings"]:
                both = ", ".join(sorted(record["settings"] ^ want["settings"]))
                raise Differs(f"settings: {both} (rank {rank})", "")
        changes = want["change"]
        most = max(map(largest, changes.values()))
        for name, change in changes.items():
            size = torch.where(self.clear[name], 0.05 * largest(change), 2.5 * most)
            bounds[name] = size + rounding[name]
            self.drift[name] += bounds[name]
        times, name, rank = find_worst([record["change"] for record in got], changes, bounds)
        if times > 1:
            apart = f"{times:.1e} times what rounding explains"
            raise Differs(f"change of {name}: {apart} (rank {rank})", "")
        buffer = self._compare_buffers(want, got)
        if buffer:
            raise Differs(buffer, BUFFERS)

    def _compare_buffers(self, want: dict[str, Any], got: list[dict[str, Any]]) -> str:
        """Name a buffer or frozen parameter that differs, if any."""
        drift = max(map(largest, self.drift.values()))  # a teacher's parameters follow the others
        found = [record["buffer"] for record in got]
        known = {name: value for name, value in want["buffer"].items() if name in found[0]}
        bounds = {name: self.tolerance * largest(value) + drift for name, value in known.items()}
        times, name, rank = find_worst(found, known, bounds)
        return f"buffer {name} (rank {rank})" if times > 1 else ""

    def _check_gradients(self, want: Values, found: list[Values], pattern: str) -> None:
        allowed = max(self.tolerance * max(map(largest, want.values())), 1e-30)
        times, name, rank = find_worst(found, want, dict.fromkeys(want, allowed))
        if times > 1:
            what = f"gradient of {name}: {times * self.tolerance:.1e} of the largest (rank {rank})"
            raise Differs(what, pattern_of(found, want, allowed, pattern))
        for name, value in want.items():
            if largest(value) > 0.01 * allowed and not any(each[name].any() for each in found):
                raise Differs(f"gradient of {name}: there is none", LOST)
            error = max(largest(distance(each[name], value)) for each in found)
            self.clear[name] &= value.abs() >= 100 * error
        self.apart = max(self.apart, times * self.tolerance)


def pattern_of(found: list[Values], want: Values, allowed: float, otherwise: str) -> str:
    """Tell what wrong gradients look like, in a sentence; `otherwise` if nothing known."""
    for name, value in want.items():
        if largest(value) > allowed and not any(each[name].any() for each in found):
            return LOST
    whole = torch.cat([*want.values()])
    first, *others = [torch.cat([each[name] for name in want]) for each in found]
    if any(distance(other, first).max() > allowed for other in others):
        return OF_EACH_RANK
    for factor, sentence in ((len(found), SUMMED), (1 / len(found), DIVIDED)):
        if distance(first, factor * whole).max() <= allowed * factor:
            return sentence
    return otherwise


def compare_runs(reference: ScriptRun, run: ScriptRun, tolerance: float, restart: int) -> str:
    """Compare all steps with those in one process; return how close they are, or raise Differs."""
    comparisons: dict[int, Comparison] = {}
    evaluated = False
    for step, place in sorted({*reference.steps(), *run.steps()}):
        begin = f"step {step + 1}" + (f" of optimizer {place + 1}" if place else "")
        (path,) = reference.records(step, place)
        if not path.exists():
            raise Differs(f"{begin} was not made in one process", "")
        want = torch.load(path)
        got: list[dict[str, Any]] = []
        for rank, path in enumerate(run.records(step, place)):
            if not path.exists():
                raise Differs(f"{begin} was not made (rank {rank})", "")
            got.append(torch.load(path))
        comparison = comparisons.setdefault(place, Comparison(want["start"], tolerance))
        if not tolerance:
            low = want["low"] or got[0]["low"]
            comparison.tolerance = LOW_TOLERANCE if low else TOLERANCE
        try:
            comparison.check_step(want, got)
        except Differs as differs:
            what, pattern = differs.args
            if restart and step == restart:
                pattern = RESTART
            elif step and got[0]["evaluated"] and not evaluated:
                pattern = EVALUATION
            raise Differs(f"{begin}, {what}", pattern) from None
        evaluated = got[0]["evaluated"]
    apart = max(comparison.apart for comparison in comparisons.values())
    return f"{len(reference.steps())} steps, gradients within {apart:.1e} of the largest"


# --- The command


def fill(words: list[str], row: str, ranks: int) -> list[str]:
    """Return the script's arguments in a row."""
    mode, _, engine = row.partition("/")
    if not engine and mode in SHARDED:
        engine = "2"
    group = str(GROUP) if mode.startswith("hybrid") else ""
    values = {"{mode}": mode, "{fsdp}": engine, "{group}": group, "{ranks}": str(ranks)}
    for number in re.findall(r"\{(\d+)/ranks\}", " ".join(words)):
        values[f"{{{number}/ranks}}"] = str(int(number) // ranks)
    filled: list[str] = []
    for word in words:
        text = word
        for name, value in values.items():
            text = text.replace(name, value)
        missing = any(name in word and not value for name, value in values.items())
        if not missing or (word in values and not (filled and filled[-1].startswith("-"))):
            filled.append(text)
        elif word in values:
            filled.pop()
    return filled


def absolute(word: str) -> str:
    """Make a relative path to something that exists absolute, also behind `--flag=`."""
    flag, equals, value = word.rpartition("=")
    return f"{flag}{equals}{Path(value).absolute()}" if value and Path(value).exists() else word


def read_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; exit with status 2 and a sentence if they make no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--modes", metavar="LIST", help=f"of {','.join(ROWS)}, or your own; default: what fits")
    add("--steps", type=int, default=4, help="steps of each optimizer (default: 4)")
    standard = f"default: {TOLERANCE}, low precision {LOW_TOLERANCE}"
    add("--tolerance", type=float, default=0.0, help=standard)
    add("--resume-after", type=int, default=0, metavar="K", help="stop after K steps, start again")
    add("--timeout", type=float, default=120.0, help="seconds that a run may take (default: 120)")
    add("script", type=Path)
    add("words", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script")
    args = parser.parse_args(argv)
    text = " ".join(args.words)
    if not args.script.is_file():
        parser.error(f"there is no file {args.script}: name a script")
    if args.ranks < 2 or args.steps < 1 or args.resume_after < 0:
        parser.error("--ranks is at least 2, --steps 1, --resume-after 0")
    if (args.modes or "{fsdp}" in text or "{group}" in text) and "{mode}" not in text:
        parser.error("write {mode} where the script takes its mode")
    if any(int(number) % args.ranks for number in re.findall(r"\{(\d+)/ranks\}", text)):
        parser.error(f"{text} has a number that {args.ranks} ranks cannot share evenly")
    args.rows = [f"{args.ranks} ranks"]
    if args.modes:
        args.rows = args.modes.split(",")
    elif "{mode}" in text:
        hybrid = "{group}" in text and args.ranks % GROUP == 0
        rows = [row for row in ROWS if "{fsdp}" in text or "/" not in row]
        args.rows = [row for row in rows if hybrid or not row.startswith("hybrid")]
    args.words = [absolute(word) for word in args.words]
    return args


def run_row(args: argparse.Namespace, folder: Path, row: str, stops: list[int]) -> ScriptRun:
    """Run the script as a row says, started again after each of these steps but the last."""
    ranks = 1 if row == ALONE else args.ranks
    plain = "ddp" if args.rows[0] in ROWS else args.rows[0]
    words = fill(args.words, plain if row == ALONE else row, ranks)
    run = ScriptRun(args.script.absolute(), words, ranks, folder, args.timeout)
    for begin, last in pairwise([0, *stops]):
        run.problem = run.problem or run.start(begin, last)
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all rows are the same, 1 if one differs or raises."""
    args = read_flags(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the ranks are killed then too
    torch.set_num_threads(1)
    gc.freeze()  # what exists now is not searched for modules
    begin = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="verify-"))
    restart = args.resume_after
    last = restart + args.steps
    width = max(map(len, [ALONE, *args.rows]))
    reference = run_row(args, scratch / "reference", ALONE, [last])
    if reference.problem:
        print(f"{ALONE:{width}}  raised   {reference.problem}")
        return 1
    print(f"{ALONE:{width}}  {len(reference.steps())} steps", flush=True)
    rows = [ALONE, *args.rows] if restart else args.rows
    patterns: dict[str, list[str]] = {}
    bad = 0
    for row in rows:
        print(f"{row} ...", end="\r", file=sys.stderr, flush=True)
        run = run_row(args, scratch / row.replace("/", "."), row, sorted({restart, last} - {0}))
        told = f"raised   {run.problem}"
        if not run.problem:
            try:
                told = f"same     {compare_runs(reference, run, args.tolerance, restart)}"
            except Differs as differs:
                what, pattern = differs.args
                told = f"differs  {what}"
                patterns.setdefault(pattern, []).append(row)
        bad += not told.startswith("same")
        print(f"{row:{width}}  {told}", flush=True)
    for pattern, which in patterns.items():
        if pattern:
            print(f"{', '.join(which)}: {pattern}")
    print(f"{bad} of {len(rows)} not the same, {time.monotonic() - begin:.0f} s")
    if bad:
        print(f"outputs: {scratch}")
        return 1
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
