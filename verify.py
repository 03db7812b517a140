"""Prove that a training script trains the same in every mode: run it, change nothing in it.

    python verify.py train.py --batch {64/ranks}     # as it is: in one process, then on two ranks
    python verify.py own_model.py {mode} {group} --fsdp {fsdp} --precision fp32     # in every mode
    python verify.py --modes ddp,full_shard/1 --resume-after 2 own_model.py {mode} --fsdp {fsdp}

Compares what the optimizers see with what they see in one process: the gradients before each step,
then parameters, buffers, settings and loss. The script needs the same global batch on any number of
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
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.utils.data
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook as call_after_steps
from torch.optim.optimizer import register_optimizer_step_pre_hook as call_before_steps

SHARDED = ("no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op")
ROWS = ("ddp", "zero1", *SHARDED, *(f"{mode}/1" for mode in SHARDED))  # "/1": FSDP1
GROUP = 2
ALONE = "one process"
# Of the largest gradient of a step. Rounding makes 1e-6 in fp32, but where it turns one input of a
# ReLU from below zero to above, 1e-4. Then where a module computes in bf16 or fp16.
TOLERANCE = 1e-3
LOW_TOLERANCE = 5e-2
GRACE = 10.0  # seconds that the other ranks get once one has failed or has come to the end

Values = dict[str, Tensor]
Copies = dict[str, list[tuple[int, Tensor]]]  # by name: (rank, whole value) of each copy


# --- In a rank: record what its optimizers see


class Recorder:
    """Writes a file for each step of each optimizer, ORDER.OPTIMIZER.STEP.RANK."""

    def __init__(self, folder: Path, rank: int, last: int, made: Sequence[int]) -> None:
        self.folder = folder
        self.rank = rank
        self.last = last  # the run is stopped when each optimizer has made so many steps
        self.made = [*made]  # steps of each before a restart, then now
        self.optimizers: list[Optimizer] = []  # in the order of their first steps
        self.inner: set[int] = set()  # optimizers inside of others, such as ZeRO-1's
        self.names: dict[int, str] = {}  # of parameters, by id
        self.roots: list[nn.Module] = []  # modules that hold them
        self.record: dict[str, Any] = {}
        self.written = 0
        self.loss: list[float] = []
        self.evaluated = False
        self.low_precision = False

    def install(self) -> None:
        """Have PyTorch call this recorder."""
        call_before_steps(self.before_step)
        call_after_steps(self.after_step)
        nn.modules.module.register_module_forward_hook(self.after_forward)
        backward = torch.autograd.backward

        def noted_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(tensors, Tensor) and tensors.numel() == 1:
                self.loss.append(float(tensors.detach()))
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = noted_backward

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            if not module.training or not torch.is_grad_enabled():
                self.evaluated = True
            if isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16):
                self.low_precision = True

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.inner |= {id(held) for held in vars(optimizer).values() if isinstance(held, Optimizer)}
        if id(optimizer) in self.inner or _makes_states():
            return
        place = self._place(optimizer)
        if min(self.made) >= self.last or self.made[place] >= 10 * self.last:
            self._wait_to_be_stopped()
        named = self._named(optimizer)
        # all ranks make a DTensor whole together, so what has no gradient is not left out
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
        scale = getattr(optimizer, "grad_scale", None)  # by which a fused optimizer divides
        self.record = {
            "start": {name: _whole(p) for name, p in named},
            "gradient": {
                n: _whole(g if scale is None else g / scale) for n, g in gradients.items()
            },
        }

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.record or id(optimizer) in self.inner or _makes_states():
            return
        named = self._named(optimizer)
        buffers = self._buffers(named)
        settings: dict[tuple[int, str], Any] = {}
        for i, group in enumerate(optimizer.param_groups):
            settings |= {(i, key): value for key, value in group.items() if key != "params"}
        self.record |= {
            "parameter": {name: _whole(p) for name, p in named},
            "buffer": {name: _whole(value) for name, value in buffers.items()},
            "parts": {name: _parts(p, name) for name, p in named},
            "settings": {f"{k} {_number(v)}" for (_, k), v in settings.items() if _number(v)},
            "loss": self.loss,
            "evaluated": self.evaluated,
            "low": self.low_precision,
            "eps": max(torch.finfo(p.dtype).eps for _, p in named),
        }
        place = self._place(optimizer)
        name = f"{self.written}.{place}.{self.made[place]}.{self.rank}"
        torch.save(self.record, self.folder / name)
        self.written += 1
        self.made[place] += 1
        self.record = {}
        self.loss = []

    def _place(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer."""
        places = [i for i, known in enumerate(self.optimizers) if known is optimizer]
        if places:
            return places[0]
        self.optimizers.append(optimizer)
        if len(self.optimizers) > len(self.made):
            self.made.append(0)
        return len(self.optimizers) - 1

    def _wait_to_be_stopped(self) -> None:
        """Wait for the other ranks: what follows the last step, such as a save, is done here."""
        path = self.folder / f"new.{self.rank}"
        path.write_text(" ".join(map(str, self.made)))
        path.rename(self.folder / f"stop.{self.rank}")
        while True:
            time.sleep(60)

    def _named(self, optimizer: Optimizer) -> list[tuple[str, Any]]:
        """List (name, parameter); where no module has it, its place is its name."""
        parameters: list[Any] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        wanted = {id(p) for p in parameters}
        if not wanted <= self.names.keys():
            modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
            below: set[int] = set()
            for module in modules:
                below |= {id(child) for child in vars(module).get("_modules", {}).values()}
            for root in (m for m in modules if id(m) not in below):
                found = {id(p): _plain(name) for name, p in root.named_parameters()}
                if wanted & found.keys() and not any(root is known for known in self.roots):
                    self.names |= found
                    self.roots.append(root)
        names = [self.names.get(id(p), "parameter") for p in parameters]
        numbered = [
            name if names.count(name) == 1 else f"{name} {i}" for i, name in enumerate(names)
        ]
        return [*zip(numbered, parameters, strict=True)]

    def _buffers(self, named: list[tuple[str, Any]]) -> dict[str, Tensor]:
        """Return the buffers and the frozen parameters of the modules that hold parameters."""
        held = {id(p) for _, p in named}
        found: dict[str, Tensor] = {}
        for root in self.roots:
            parameters = [*root.named_parameters()]
            if any(id(p) in held for _, p in parameters):
                found |= {_plain(name): p for name, p in parameters if not p.requires_grad}
                found |= {_plain(name): value for name, value in root.named_buffers()}
        return found


def _makes_states() -> bool:
    """Tell whether PyTorch takes a step of no size, in order to make an optimizer's states."""
    frame: Any = sys._getframe()
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def _plain(name: str) -> str:
    """Return a name without what DDP, FSDP1, checkpointing and torch.compile put into it."""
    wrappers = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _whole(value: Any) -> Tensor:
    """Copy a tensor into a vector of at least fp32; collective for a DTensor."""
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.is_sparse:
        value = value.to_dense()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.to(torch.promote_types(value.dtype, torch.float32), copy=True).flatten()


def _parts(p: Any, name: str) -> list[tuple[str, int]]:
    """List (name, elements) of what FSDP1 with use_orig_params=False has in a flat parameter."""
    if not hasattr(p, "_numels_with_padding"):  # this and what follows are private names
        return []
    names = iter(p._fqns)
    pairs = zip(p._numels_with_padding, p._is_padding_mask, strict=True)
    unit = name.removesuffix("_flat_param")
    return [("" if padding else unit + _plain(next(names)), size) for size, padding in pairs]


def _number(setting: Any) -> str:
    """Write a setting such as a learning rate; empty if it is not a number."""
    if isinstance(setting, tuple | list):
        return " ".join(map(_number, setting))
    is_number = isinstance(setting, int | float | Tensor) and not isinstance(setting, bool)
    return f"{float(setting):.6g}" if is_number else ""


# --- The ranks of a run: processes forked from this one, which has imported PyTorch already


@dataclass
class ScriptRun:
    """The script on some ranks, in a folder of its own."""

    script: Path
    words: list[str]  # its arguments
    ranks: int
    folder: Path
    timeout: float

    def start(self, last: int, made: Sequence[int] = ()) -> str:
        """Run until each optimizer has made `last` steps; return what went wrong, if anything."""
        for name in ("records", "work"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for path in self.arrived().values():
            path.unlink()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            _, port = free.getsockname()
        running: dict[int, int] = {}
        try:
            for rank in range(self.ranks):
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    self._become_rank(Recorder(self.folder / "records", rank, last, made), port)
                running[pid] = rank
            return self._wait(running)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what it has started, such as a loader
                os.waitpid(pid, 0)

    def arrived(self) -> dict[int, Path]:
        """Return the files of the ranks that have made all steps: steps by optimizer."""
        return {int(path.suffix[1:]): path for path in self.folder.glob("records/stop.*")}

    def output(self, rank: int) -> Path:
        """Return the file that has what a rank printed."""
        return self.folder / f"rank{rank}.txt"

    def _become_rank(self, recorder: Recorder, port: int) -> NoReturn:
        """Run the script as torchrun would, and end this process."""
        status = 1
        try:
            os.setsid()
            # renews PyTorch's pool of threads, which does not survive a fork, before two threads
            # of a backward pass try to do so at once
            torch.set_num_threads(1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            output = os.open(self.output(recorder.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(output, stream)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            faulthandler.register(signal.SIGUSR2, sys.stderr, all_threads=True)
            variables = environment(recorder.rank, self.ranks, port)
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(self.folder / "work")
            random.seed()  # or all runs would draw what the process draws that they are forked from
            sys.argv = [str(self.script), *self.words]
            sys.path[:1] = [str(self.script.parent), str(Path(__file__).resolve().parent)]
            recorder.install()
            runpy.run_path(str(self.script), run_name="__main__")
            status = 0
        except SystemExit as leave:
            status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
            if isinstance(leave.code, str):
                print(leave.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _wait(self, running: dict[int, int]) -> str:
        """Wait until each rank has ended or made all steps; return what went wrong."""
        begin = time.monotonic()
        deadline = begin + self.timeout
        errors: dict[int, str] = {}
        arrived = self.arrived()
        while (
            running
            and (errors or {*running.values()} - arrived.keys())
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
            for pid in [*running]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    rank = running.pop(pid)
                    if status:
                        errors[rank] = self._last_error(rank, os.waitstatus_to_exitcode(status))
            arrived = self.arrived()
            now = time.monotonic()
            if (errors or arrived) and deadline == begin + self.timeout:
                deadline = min(deadline, now + GRACE + (0 if errors else now - begin))
        if errors:
            # a rank whose neighbour has failed says that the connection is closed
            by_another = {r: "onnection" in e or "gloo" in e for r, e in errors.items()}
            rank = min(errors, key=by_another.__getitem__)
            return f"{errors[rank]} (rank {rank}; all of it: {self.output(rank)})"
        late = sorted({*running.values()} - arrived.keys())
        if not late:
            return ""
        for pid in running:
            os.kill(pid, signal.SIGUSR2)  # it writes its stack
        time.sleep(0.5)
        waits = "another has made all steps" if arrived else f"{self.timeout:g} s are over"
        return f"rank {late[0]} hangs: {waits} (its stack: {self.output(late[0])})"

    def _last_error(self, rank: int, status: int) -> str:
        lines = self.output(rank).read_text(errors="replace").split("\n")
        lines = [
            f"exit status {status}, by signal where below 0",
            *(line for line in lines if line.strip()),
        ]
        starts = re.compile(r"[\w.]+(Error|Exception|Exit)\b|\s+what\(\):")
        raised = [line for line in lines if starts.match(line)]
        last = raised[-1] if raised else lines[-1]
        return last[:200]


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables as torchrun sets them, without GPUs and those of other launchers."""
    others = ("SLURM_", "PMI_", "OMPI_", "FLUX_", "JSM_", "MV2_")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    variables |= {f"{name}_VISIBLE_DEVICES": "" for name in ("CUDA", "HIP", "ROCR")}
    variables |= {f"{part}RANK": str(rank) for part in ("", "LOCAL_", "ROLE_")}
    variables |= {f"{part}WORLD_SIZE": str(ranks) for part in ("", "LOCAL_", "ROLE_")}
    variables |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    variables |= {"TORCHELASTIC_RUN_ID": "verify", "TORCHELASTIC_RESTART_COUNT": "0"}
    # a computer's own name, from which gloo would find the interface, may not resolve
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return variables


# --- Compare what was recorded


class Differs(Exception):
    """What differs first; `pattern` says what that looks like."""

    def __init__(self, what: str, pattern: str = "") -> None:
        super().__init__(what)
        self.pattern = pattern


BETWEEN = "the parameters differ before the step: give all ranks one seed, and change them alike"
SETTINGS = "the optimizers have other settings: compute them from the global batch and the step"
STEP = "the gradients are the same, but not the step: the optimizer needs whole tensors"
BUFFERS = "only buffers differ, such as BatchNorm's, which each rank computes from its own images"
LOSS = "only the loss differs: its mean over ranks is not that of the whole batch"
EVALUATION = "the steps are the same until the first evaluation, which must change nothing"
LOST = "no gradient: the optimizer was built before sharding, or a call went past the wrapper"
NOT_AVERAGED = "each rank has another gradient, and the mean is right: they are not averaged"
EACH_OTHER = "each rank has another gradient"
SUMMED = "the gradients are multiplied by the number of ranks: summed instead of averaged"
DIVIDED = "the gradients are divided by the number of ranks once too often"
STATES = "the step after the restart differs, not its gradients: states were not restored"
EARLIER = "the restart went on from an older step: it found no newer checkpoint"


def assemble(pieces: list[Tensor], size: int) -> list[tuple[int, Tensor]]:
    """Return (rank, value) for each whole copy that the ranks hold, alone or as FSDP1's parts."""
    if all(piece.numel() == size for piece in pieces):
        return [*enumerate(pieces)]
    whole = []
    held: list[Tensor] = []
    for rank, piece in enumerate(pieces):  # the ranks of a shard group follow one another
        held.append(piece)
        if sum(part.numel() for part in held) >= size:
            copy, _ = torch.cat(held).tensor_split([size])  # without what FSDP1 adds at the end
            whole.append((rank, copy))
            held = []
    return whole


def copies(records: list[dict[str, Any]], what: str, want: Values) -> Copies:
    """Return the ranks' copies of each value that one process has."""
    found: Copies = {name: [] for name in want}
    first = records[0][what]
    by_place = dict(zip(first, want, strict=True)) if len(first) == len(want) else {}
    names = {name: name if name in want else by_place.get(name, name) for name in first}
    for name in first:
        pieces = [record[what][name] for record in records if name in record[what]]
        parts = records[0]["parts"].get(name)
        if not parts and names[name] in want:
            found[names[name]] = assemble(pieces, len(want[names[name]]))
        if parts:
            sizes = [size for _, size in parts]
            for rank, flat in assemble(pieces, sum(sizes)):
                for (part, _), value in zip(parts, flat.split(sizes), strict=True):
                    found.setdefault(part, []).append((rank, value))
    return found


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of each element; none where both are the same or not a number."""
    alike = (one == other) | (one.isnan() & other.isnan())
    return torch.where(alike, 0.0, (one - other).abs().nan_to_num(1e30, 1e30))


def largest(value: Tensor) -> float:
    """Return the largest absolute value that is finite."""
    return value.nan_to_num(0, 0, 0).abs().max().item() if len(value) else 0.0


class Comparison:
    """The steps of an optimizer beside those in one process."""

    def __init__(self, start: Values, tolerance: float) -> None:
        self.given = tolerance  # 0: the default
        self.tolerance = tolerance
        self.moved = 0.0  # sum of each step's largest change
        # AdamW's first steps are as large for a gradient of 1e-9 as for one of 1, and may have
        # either sign where a gradient is only rounding, as that of a key's bias. So the gradients
        # decide, and the change of a parameter must agree to 5 % only where they were clear.
        self.clear = {name: torch.ones_like(p, dtype=torch.bool) for name, p in start.items()}
        self.evaluated = False
        self.apart = 0.0  # of gradients, as a part of the largest

    def check_step(self, want: dict[str, Any], got: list[dict[str, Any]], drift: float) -> None:
        """Raise Differs for a difference; `drift`: how far parameters may be apart already."""
        if not self.given:
            low = any(record["low"] for record in (want, *got))
            self.tolerance = LOW_TOLERANCE if low else TOLERANCE
        start = want["start"]
        rounding = {name: 8 * want["eps"] * largest(p) for name, p in start.items()}
        before = copies(got, "start", start)
        bounds = {name: drift + size for name, size in rounding.items()}
        times, name, rank = find_worst(before, start, bounds)
        if times > 1:
            raise Differs(f"parameter {name} before it (rank {rank})", BETWEEN)
        self._check_gradients(want["gradient"], copies(got, "gradient", want["gradient"]), len(got))
        if want["settings"] != got[0]["settings"]:
            ours = ", ".join(sorted(got[0]["settings"] - want["settings"]))
            wanted = ", ".join(sorted(want["settings"] - got[0]["settings"]))
            raise Differs(f"settings: {ours} instead of {wanted}", SETTINGS)

        changes = {name: want["parameter"][name] - p for name, p in start.items()}
        most = max(map(largest, changes.values()))
        self.moved += most
        for name, change in changes.items():
            size = torch.where(self.clear[name], 0.05 * largest(change), 2.5 * most)
            bounds[name] = size + rounding[name]
        changed: Copies = {}
        for name, after in copies(got, "parameter", start).items():
            pairs = zip(after, before[name], strict=True)
            changed[name] = [(rank, new - old) for (rank, new), (_, old) in pairs]
        times, name, rank = find_worst(changed, changes, bounds)
        if times > 1:
            what = f"change of {name}: {times:.1e} times what rounding explains (rank {rank})"
            raise Differs(what, STEP)
        self._check_buffers(want["buffer"], got)
        self._check_loss(sum(want["loss"]), len(want["loss"]), got)

    def _check_gradients(self, want: Values, found: Copies, ranks: int) -> None:
        most = max(map(largest, want.values()))
        allowed = self.tolerance * most if most else 1e-30
        times, name, rank = find_worst(found, want, dict.fromkeys(want, allowed))
        if times > 1:
            apart = f"{times * self.tolerance:.1e} of the largest"
            what = f"gradient of {name}: {apart} (rank {rank})"
            raise Differs(what, pattern_of(found, want, ranks, allowed))
        for name, value in want.items():
            error = max(largest(distance(copy, value)) for _, copy in found[name])
            if largest(value) > 0.01 * allowed and not any(copy.any() for _, copy in found[name]):
                raise Differs(f"gradient of {name}: there is none", LOST)
            self.clear[name] &= value.abs() >= 100 * error
        self.apart = max(self.apart, times * self.tolerance)

    def _check_buffers(self, want: Values, got: list[dict[str, Any]]) -> None:
        want = {name: value for name, value in want.items() if name in got[0]["buffer"]}
        bounds = {name: self.tolerance * largest(value) for name, value in want.items()}
        times, name, rank = find_worst(copies(got, "buffer", want), want, bounds)
        if times > 1:
            apart = f"{times * self.tolerance:.1e} of its largest"
            raise Differs(f"buffer {name}: {apart} (rank {rank})", BUFFERS)

    def _check_loss(self, loss: float, passes: int, got: list[dict[str, Any]]) -> None:
        """Compare the mean over ranks, where each calls backward() as often as one process."""
        if all(len(record["loss"]) == passes for record in got):
            mean = sum(sum(record["loss"]) for record in got) / len(got)
            if abs(mean - loss) > 10 * self.tolerance * max(abs(loss), 1e-3):
                raise Differs(f"loss: {mean:.6g} instead of {loss:.6g}", LOSS)


def find_worst(found: Copies, want: Values, bounds: dict[str, Any]) -> tuple[float, str, int]:
    """Return (times what is allowed, name, rank) of the largest distance."""
    worst = (0.0, "", 0)
    for name, value in want.items():
        if not found[name]:
            return math.inf, name, 0
        for rank, copy in found[name]:
            times = largest(distance(copy, value) / (bounds[name] + 1e-30))
            worst = max(worst, (times, name, rank))
    return worst


def pattern_of(found: Copies, want: Values, ranks: int, allowed: float) -> str:
    """Tell what wrong gradients look like, in a sentence."""
    for name, value in want.items():
        if largest(value) > allowed and not any(copy.any() for _, copy in found[name]):
            return LOST
    whole = torch.cat([*want.values()])
    count = min(map(len, found.values()))
    if not count:
        return ""
    of_ranks = [torch.cat([found[name][i][1] for name in want]) for i in range(count)]
    if any(distance(one, of_ranks[0]).max() > allowed for one in of_ranks):
        mean = torch.stack(of_ranks).mean(0)
        return NOT_AVERAGED if distance(mean, whole).max() <= allowed else EACH_OTHER
    factor = (of_ranks[0].dot(whole) / whole.dot(whole)).item()
    if distance(of_ranks[0], factor * whole).max() > allowed * max(1, factor):
        return ""
    named = {ranks: SUMMED, 1 / ranks: DIVIDED}
    close = [text for number, text in named.items() if math.isclose(factor, number, rel_tol=0.01)]
    return close[0] if close else f"the gradients are {factor:.3g} times those of one process"


def read_records(run: ScriptRun) -> dict[tuple[int, int], dict[int, Path]]:
    """Return the files of each (step, optimizer) by rank, in the order in which they were made."""
    found: dict[tuple[int, int], dict[int, Path]] = {}
    paths = {tuple(map(int, p.name.split("."))): p for p in run.folder.glob("records/*.*.*.*")}
    for order, place, step, rank in sorted(paths):
        found.setdefault((step, place), {})[rank] = paths[order, place, step, rank]
    return found


def compare_runs(reference: ScriptRun, run: ScriptRun, tolerance: float, restart: int) -> str:
    """Compare all steps with those in one process; return how close they are, or raise Differs."""
    wanted = read_records(reference)
    found = read_records(run)
    comparisons: dict[int, Comparison] = {}
    for step, place in {**wanted, **found}:
        files = found.get((step, place), {})
        begin = f"step {step + 1}" + (f" of optimizer {place + 1}" if place else "")
        if (step, place) not in wanted:
            raise Differs(f"{begin} was not made in one process")
        if len(files) < run.ranks:
            rank = min({*range(run.ranks)} - files.keys())
            raise Differs(f"{begin} was not made (rank {rank})")
        want = torch.load(wanted[step, place][0])
        got = [torch.load(files[rank]) for rank in sorted(files)]
        comparison = comparisons.setdefault(place, Comparison(want["start"], tolerance))
        drift = 2.5 * sum(each.moved for each in comparisons.values())
        try:
            comparison.check_step(want, got, drift)
        except Differs as differs:
            pattern = differs.pattern
            if restart and step == restart and pattern == STEP:
                pattern = STATES
            elif restart and step == restart and pattern != SETTINGS:
                pattern = EARLIER
            elif step and got[0]["evaluated"] and not comparison.evaluated:
                pattern = EVALUATION
            raise Differs(f"{begin}, {differs}", pattern) from None
        comparison.evaluated = got[0]["evaluated"]
    apart = max(comparison.apart for comparison in comparisons.values())
    return f"{len(wanted)} steps, gradients within {apart:.1e} of the largest"


# --- The command


def fill(words: list[str], row: str, ranks: int) -> list[str]:
    """Return the script's arguments in a row."""
    mode, _, engine = row.partition("/")
    if not engine and mode in SHARDED:
        engine = "2"
    values = {
        "{mode}": mode,
        "{fsdp}": engine,
        "{group}": str(GROUP) if mode.startswith("hybrid") else "",
        "{ranks}": str(ranks),
    }
    filled: list[str] = []
    for word in words:
        text = word
        for share in re.findall(r"\{(\d+)/ranks\}", word):
            text = text.replace(f"{{{share}/ranks}}", str(int(share) // ranks))
        missing = any(name in word and not value for name, value in values.items())
        for name, value in values.items():
            text = text.replace(name, value)
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
    add(
        "--tolerance",
        type=float,
        default=0.0,
        help=f"default: {TOLERANCE}, low precision {LOW_TOLERANCE}",
    )
    add("--resume-after", type=int, default=0, metavar="K", help="stop after K steps, start again")
    add("--timeout", type=float, default=300.0, help="seconds that a run may take (default: 300)")
    add("script", type=Path)
    add("words", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script")
    args = parser.parse_args(argv)
    text = " ".join(args.words)
    shares = [int(n) for n in re.findall(r"\{(\d+)/ranks\}", text) if int(n) % max(1, args.ranks)]
    needs_mode = args.modes or "{fsdp}" in text or "{group}" in text
    if not args.script.is_file():
        parser.error(f"there is no file {args.script}: name a script")
    if args.ranks < 2 or args.steps < 1 or args.resume_after < 0 or args.timeout <= 0:
        parser.error("--ranks is at least 2, --steps 1, --resume-after 0, --timeout above 0")
    if needs_mode and "{mode}" not in text:
        parser.error("write {mode} where the script takes its mode")
    if shares:
        parser.error(f"{shares[0]} cannot be divided by {args.ranks} ranks")
    args.rows = [f"{args.ranks} ranks"]
    if args.modes:
        args.rows = [row for row in args.modes.split(",") if row]
    elif "{mode}" in text:
        rows = [row for row in ROWS if "{fsdp}" in text or "/" not in row]
        hybrid = "{group}" in text and args.ranks % GROUP == 0
        args.rows = [row for row in rows if hybrid or not row.startswith("hybrid")]
    args.script = args.script.absolute()
    args.words = [absolute(word) for word in args.words]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all rows are the same, 1 if one differs or raises, 2 for nothing to do."""
    args = read_flags(argv)
    torch.set_num_threads(1)
    gc.freeze()  # what exists now is not searched for modules
    begin = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="verify-"))
    last = args.steps + args.resume_after
    plain = "ddp" if {*args.rows} <= {*ROWS} else args.rows[0]
    width = max(map(len, [ALONE, *args.rows]))
    alone = ScriptRun(args.script, fill(args.words, plain, 1), 1, scratch / "alone", args.timeout)
    problem = alone.start(last)
    if problem:
        print(f"{ALONE:{width}}  raised   {problem}")
        return 1
    if not read_records(alone):
        print(f"in one process no optimizer made a step: see {alone.output(0)}", file=sys.stderr)
        return 2
    print(f"{ALONE:{width}}  {len(read_records(alone))} steps", flush=True)
    patterns: dict[str, list[str]] = {}
    bad = 0
    if args.resume_after:
        args.rows.insert(0, ALONE)
    for row in args.rows:
        if sys.stderr.isatty():
            print(f"{row} ...", end="\r", file=sys.stderr, flush=True)
        ranks = 1 if row == ALONE else args.ranks
        words = fill(args.words, plain if row == ALONE else row, ranks)
        run = ScriptRun(args.script, words, ranks, scratch / row.replace("/", "."), args.timeout)
        problem = run.start(args.resume_after if args.resume_after else last)
        if args.resume_after and not problem and run.arrived():
            made = next(iter(run.arrived().values())).read_text().split()
            problem = run.start(last, [*map(int, made)])
        told = f"raised   {problem}"
        if not problem:
            try:
                told = f"same     {compare_runs(alone, run, args.tolerance, args.resume_after)}"
                shutil.rmtree(run.folder)
            except Differs as differs:
                told = f"differs  {differs}"
                patterns.setdefault(differs.pattern, []).append(row)
        bad += not told.startswith("same")
        print(f"{row:{width}}  {told}", flush=True)
    for pattern, rows in patterns.items():
        if pattern:
            print(f"{', '.join(rows)}: {pattern}")
    if bad:
        print(f"outputs: {scratch}")
    else:
        shutil.rmtree(scratch)
    print(f"{bad} of {len(args.rows)} not the same, {time.monotonic() - begin:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
