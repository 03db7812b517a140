"""Measure the machine that these ranks run on, in about a minute: `plan.py --measure FILE`.

All ranks compute at once, because those of a node may share cores, power or memory; a collective
is measured in all groups of its size at once. Measured are blocks, the optimizer, copies,
collectives, and a small model with and without FSDP, for what these parts do not account for. What
one process, or one node, cannot show is taken from the most similar known machine.
"""

import copy
import math
import platform
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mesh
import shard
import vit
from planner import estimate, fitting, machines
from planner.machines import BlockSpeed, LinkSpeed, Machine
from planner.traffic import PlannedRun
from runtime import devices
from runtime.agreement import StepGuard, run_on_all_ranks, run_on_rank0
from runtime.config import DTYPES
from runtime.run import Run
from runtime.session import Session

ROUND_SECONDS = 0.15  # the repetitions of one measurement take about so long
MAX_REPEATS = 50
LONG_SECONDS = 0.5  # a measurement that takes longer is not repeated


@dataclass(frozen=True)
class Sizes:
    """What is measured: small enough for a minute, large enough for the device."""

    shapes: tuple[tuple[int, int, int], ...]  # width, heads, MLP width of a block
    batches: tuple[tuple[int, int], ...]  # images, tokens
    product_rows: int
    payloads: tuple[int, int, int]  # bytes of collectives
    optimizer_numel: int
    toy: vit.ViTConfig
    toy_images: int


CPU_SIZES = Sizes(
    shapes=((128, 4, 512), (768, 12, 3072)),
    batches=((4, 17), (16, 17), (4, 65), (2, 197), (1, 401)),
    product_rows=128,
    payloads=(2**16, 2**20, 24 * 2**20),
    optimizer_numel=2**22,
    toy=replace(vit.MODELS["tiny"], depth=3, decoder_depth=3),
    toy_images=2,
)
GPU_SIZES = Sizes(
    shapes=((512, 16, 2048), (2816, 32, 11264)),
    batches=((16, 50), (32, 50), (32, 197), (64, 197), (8, 785)),
    product_rows=8192,
    payloads=(2**18, 2**23, 2**27),
    optimizer_numel=2**26,
    toy=replace(vit.MODELS["base"], depth=6, decoder_depth=6),
    toy_images=8,
)


def measure_machine(run: Run, session: Session, path: str) -> None:
    """Measure, write the file and print what was found. Collective; AgreedError if it fails."""
    ranks = session.ranks
    run_on_all_ranks(lambda: check_node(ranks.local_world_size, run.node_ranks))
    run_on_rank0(lambda: check_path(path))
    measurement = Measurement(session)
    changes = measurement.all()
    like = measurement.like
    missing = not_measured(measurement)
    if ranks.rank == 0:
        session.log.say(*report_lines(measurement, changes, missing))

    def write() -> None:
        text = machines.machine_file(like, changes, missing)
        Path(path).write_text(text)
        machines.read_machine(path)  # it can be used

    run_on_rank0(write)
    session.log.say(f"written to {path}: use --machine {path}")


def check_node(own: int, most: int) -> None:
    """Raise ValueError if this node has fewer ranks than another."""
    if own < most:
        raise ValueError(
            f"a node has {own} ranks where another has {most}: start --measure with as many ranks "
            "on each node"
        )


def check_path(path: str) -> None:
    """Raise ValueError if the file cannot be written, before a minute is spent."""
    if path in machines.MACHINES:
        raise ValueError(f"--measure {path} is the name of a known machine: give another file")
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ValueError(f"--measure {path}: {error.strerror}: give a file to write") from None


class Measurement:
    """Measure the parts of a machine; every method is collective, and all ranks find the same."""

    def __init__(self, session: Session) -> None:
        self.ranks = session.ranks
        self.device = session.device
        self.heartbeat = session.heartbeat
        self.on_gpu = session.device.type == "cuda"
        self.sizes = GPU_SIZES if self.on_gpu else CPU_SIZES
        self.memory_gib = devices.rank_memory_gib(self.device, self.ranks.local_world_size)
        self.sheet_flops, _ = devices.peak_flops(self.device)
        self.like = machines.nearest_machine(self.sheet_flops, self.memory_gib)
        self.node_ranks = self.ranks.local_world_size
        self.nodes = self.ranks.world_size // self.node_ranks
        self.products: dict[str, float] = {}  # FLOP/s by precision

    def all(self) -> dict[str, Any]:
        """Return the fields of Machine that were measured."""
        blocks = [self.block_speed(precision) for precision in ("fp32", "bf16")]
        links = fitting.fit_link_speeds(self.collective_times(), self.node_ranks, self.like)
        peak = self.sheet_flops or self.products["bf16"]
        changes: dict[str, Any] = {
            "measured": self.description(),
            "device": self.device.type,
            "ranks_per_package": self.package_ranks(),
            "ranks_per_node": self.node_ranks,
            "memory_gib": self.memory_gib,
            "peak_flops": peak,
            "efficiency": self.products["bf16"] / peak,
            "fp32_share": self.products["fp32"] / self.products["bf16"],
            "host_bytes_per_second": self.host_rate(),
            "optimizer_bytes_per_second": self.optimizer_rate(),
            "copy_bytes_per_second": self.copy_rate(),
            "hidden_share": self.hidden_share(),
            "blocks": tuple(blocks),
            "links": tuple(links),
        }
        if not self.on_gpu:  # its attention pads no heads, its libraries hold no workspace
            changes |= {"head_multiple": 1, "workspace_gib": 0.0}
        machine = replace(self.like, name="measured", **changes)
        return changes | self.left_over(machine)

    def description(self) -> str:
        """Say in a few words what was measured, when, with which versions."""
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else cpu_name()
        where = f"{name}, ranks {self.ranks.world_size}, nodes {self.nodes}"
        return f"{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"

    def package_ranks(self) -> int:
        """Count the ranks of a package: the known machine's, if pairs of ranks exist here."""
        size = self.like.ranks_per_package
        return size if self.on_gpu and self.node_ranks % size == 0 else 1

    # -- the clock

    def seconds(self, work: Callable[[], object]) -> float:
        """Time a call that all ranks make at once: the mean of three rounds of repetitions.

        Not the median: a step makes many such calls, and the slow ones among them count.
        """
        work()
        first = self.round_seconds(work, 1)
        if first > LONG_SECONDS:
            return first
        repeats = max(1, min(MAX_REPEATS, int(ROUND_SECONDS / first)))
        rounds = [self.round_seconds(work, repeats) for _ in range(3)]
        return mean(rounds)

    def round_seconds(self, work: Callable[[], object], repeats: int) -> float:
        """Time some repetitions -> seconds of one, the mean of all ranks."""
        self.wait()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        spent = torch.tensor((time.perf_counter() - start) / repeats, dtype=torch.float64)
        dist.all_reduce(spent)
        return float(spent) / self.ranks.world_size

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    # -- compute

    def block_speed(self, precision: str) -> BlockSpeed:
        """Measure products and whole blocks in one precision."""
        self.heartbeat(f"measuring blocks in {precision}")
        self.products[precision] = max(
            self.product_rate(width, hidden, DTYPES[precision])
            for width, _, hidden in self.sizes.shapes
        )
        batches = self.sizes.batches
        usual, _ = devices.default_precision(self.on_gpu)
        if precision == "bf16" and usual == "fp32":
            batches = batches[:1]  # this CPU is slow in it, and few will use it
        times = []
        for width, heads, hidden in self.sizes.shapes:
            block = vit.Block(width, heads, hidden).to(self.device, DTYPES[precision])
            numel = sum(p.numel() for p in block.parameters())
            for images, tokens in batches:
                seconds = self.seconds(block_step(block, images, tokens))
                size = estimate.BlockSize(images, tokens, width, heads, numel, width // heads)
                times.append((size, seconds))
        return fitting.fit_block_speed(precision, times, self.host_seconds(precision))

    def product_rate(self, width: int, hidden: int, dtype: torch.dtype) -> float:
        """Measure FLOP/s of a layer's three products: forward, and two in backward."""
        rows = self.sizes.product_rows
        x = torch.randn(rows, width, device=self.device, dtype=dtype)
        weight = torch.randn(width, hidden, device=self.device, dtype=dtype)
        gradient = torch.randn(rows, hidden, device=self.device, dtype=dtype)

        def products() -> None:
            x @ weight
            gradient @ weight.T
            x.T @ gradient

        return 3 * 2 * rows * width * hidden / self.seconds(products)

    def host_seconds(self, precision: str) -> float:
        """Measure how long the host takes to launch a block's kernels; 0 on a CPU."""
        if not self.on_gpu:
            return 0.0
        width, heads, hidden = self.sizes.shapes[0]
        block = vit.Block(width, heads, hidden).to(self.device, DTYPES[precision])
        return self.seconds(block_step(block, 1, 17))  # the device is done before the host

    # -- memory

    def optimizer_rate(self) -> float:
        """Measure the bytes per second of fused AdamW, which reads 16 a parameter, writes 12."""
        self.heartbeat("measuring AdamW and copies")
        count = 16
        numel = self.sizes.optimizer_numel
        parameters = [
            nn.Parameter(torch.zeros(numel // count, device=self.device)) for _ in range(count)
        ]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.AdamW(parameters, fused=True)
        return 28 * numel / self.seconds(optimizer.step)

    def copy_rate(self) -> float:
        """Measure the bytes per second of a copy into new memory on the device."""
        source = torch.ones(self.sizes.payloads[-1] // 4, device=self.device)
        return 4 * source.numel() / self.seconds(source.clone)

    def host_rate(self) -> float:
        """Measure the bytes per second from the host's memory to the device."""
        source = torch.ones(self.sizes.payloads[-1] // 4, pin_memory=self.on_gpu)
        there = torch.empty_like(source, device=self.device)
        send = partial(there.copy_, source, non_blocking=True)
        return 4 * source.numel() / self.seconds(send)

    # -- links

    def collective_times(self) -> list[fitting.CollectiveTime]:
        """Measure collectives of three sizes inside packages, nodes and over the network."""
        found: list[fitting.CollectiveTime] = []
        local = self.node_ranks
        world = self.ranks.world_size
        grid = mesh.build_mesh((self.nodes, local), self.device)
        if local % 2 == 0:
            level = "package" if self.package_ranks() == 2 else "node"
            pairs = mesh.build_mesh((world // 2, 2), self.device)
            found += self.times_in(level, pairs.get_group("shard"))
        if local > 2:
            found += self.times_in("node", grid.get_group("shard"))
        if self.nodes > 1:
            found += self.times_in("network", grid.get_group("replicate"))
        return found

    def times_in(self, level: str, group: dist.ProcessGroup) -> list[fitting.CollectiveTime]:
        """Measure each kind of collective in each size on one kind of groups, all at once."""
        found = []
        ranks = group.size()
        for payload in self.sizes.payloads:
            for kind in machines.COLLECTIVES:
                self.heartbeat(f"measuring {kind} of {payload} bytes, {ranks} ranks, {level}")
                seconds = self.seconds(collective(kind, payload, group, self.device))
                found.append(fitting.CollectiveTime(level, kind, ranks, payload, seconds))
        return found

    def hidden_share(self) -> float:
        """Measure how much of an all-reduce a device hides behind products; 0 on a CPU."""
        if not self.on_gpu:  # it sends with the cores that compute
            return 0.0
        if self.ranks.world_size == 1:
            return self.like.hidden_share
        width = self.sizes.shapes[-1][0]
        a = torch.randn(width, width, device=self.device, dtype=torch.bfloat16)
        payload = torch.ones(self.sizes.payloads[-1] // 4, device=self.device)
        sending = self.seconds(partial(dist.all_reduce, payload))
        one = self.seconds(partial(torch.matmul, a, a))
        count = max(1, round(sending / one))

        def both() -> None:
            work: Any = dist.all_reduce(payload, async_op=True)
            for _ in range(count):
                torch.matmul(a, a)
            work.wait()

        hidden = (sending + count * one - self.seconds(both)) / min(sending, count * one)
        return max(0.0, min(1.0, hidden))

    # -- what the parts leave over: a small model, plain and with FSDP

    def left_over(self, machine: Machine) -> dict[str, float]:
        """Compare a small model with the sum of its parts by `machine`."""
        self.heartbeat("measuring a small model")
        toy = self.sizes.toy
        images = self.sizes.toy_images
        side = 4 * toy.patch
        alone = PlannedRun(toy, "ddp", 1, images, side, 0.75, precision="fp32")
        together = replace(alone, mode="full_shard", world_size=self.ranks.world_size)
        plain = vit.ViTMAE(toy, side).to(self.device)
        sharded = self.shard_model(copy.deepcopy(plain))
        # forward and backward
        whole = self.seconds(model_step(plain, images))
        root = max(0.0, whole - estimate.forward_backward_seconds(alone, machine))
        machine = replace(machine, root_seconds=root)
        sent, _ = estimate.communication_seconds(together, machine)
        whole = self.seconds(model_step(sharded, images))
        units = whole - sent - estimate.forward_backward_seconds(together, machine)
        # norm, vote and AdamW
        whole = self.seconds(self.update(plain))
        step = max(0.0, whole - estimate.optimizer_seconds(alone, machine))
        whole = self.seconds(self.update(sharded))
        tensors = whole - step - estimate.optimizer_seconds(together, machine)
        return {
            "root_seconds": root,
            "unit_seconds": max(0.0, units) / (1 + toy.depth + toy.decoder_depth),
            "tensor_seconds": max(0.0, tensors) / len([*plain.parameters()]),
            "step_seconds": step,
        }

    def shard_model(self, model: vit.ViTMAE) -> nn.Module:
        """Shard a model over all ranks."""
        grid = mesh.build_mesh((1, self.ranks.world_size), self.device)
        # PyTorch warns that the output is a view that must not be written to; nobody does
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        options = shard.ShardingOptions(param_dtype=torch.float32)
        return shard.apply(model, "full_shard", grid, block_classes={vit.Block}, options=options)

    def update(self, model: nn.Module) -> Callable[[], None]:
        """Make the work of a step after backward."""
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        guard = StepGuard(self.device)
        optimizer = shard.build_optimizer(model, "full_shard", (), lr=1e-6, weight_decay=0.0)
        loss = torch.zeros((), device=self.device)

        def work() -> None:
            norm = shard.clip_grad_norm(model)
            skip = guard.check_step(loss, norm)
            shard.optimizer_step(optimizer, skip)
            guard.read_results()

        return work


# --- The work that is timed


def block_step(block: nn.Module, images: int, tokens: int) -> Callable[[], None]:
    """Make forward and backward of a block on images of so many tokens."""
    p = next(block.parameters())
    x = torch.randn(images, tokens, p.shape[0], device=p.device, dtype=p.dtype, requires_grad=True)
    gradient = torch.randn_like(x)

    def work() -> None:
        block(x).backward(gradient)
        block.zero_grad()
        x.grad = None

    return work


def model_step(model: nn.Module, images: int) -> Callable[[], None]:
    """Make forward and backward of a small ViT-MAE on images of 4 x 4 patches."""
    device = next(model.parameters()).device
    inner: Any = model
    config = inner.config
    side = 4 * config.patch
    x = torch.randn(images, config.channels, side, side, device=device)
    noise = torch.rand(images, 16, device=device)

    def work() -> None:
        loss, _, _ = model(x, 0.75, noise)
        loss.backward()
        model.zero_grad()

    return work


def collective(
    kind: str, payload: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """Make a collective on a full tensor of `payload` bytes."""
    ranks = group.size()
    part = math.ceil(payload / 4 / ranks)
    whole = torch.ones(part * ranks, device=device)
    piece = torch.ones(part, device=device)
    if kind == "all_gather":
        return partial(dist.all_gather_into_tensor, whole, piece, group=group)
    if kind == "reduce_scatter":
        return partial(dist.reduce_scatter_tensor, piece, whole, group=group)
    if kind == "all_reduce":
        return partial(dist.all_reduce, whole, group=group)
    return partial(dist.broadcast, whole, group=group, group_src=0)


# --- What is printed


def cpu_name() -> str:
    """Return the name of the CPU, as Linux knows it."""
    info = Path("/proc/cpuinfo")
    found = None
    if info.exists():
        found = re.search(r"model name\s*: (.+)", info.read_text())
    return found[1].strip() if found else platform.machine()


def not_measured(measurement: Measurement) -> list[str]:
    """List the fields that come from the nearest known machine."""
    known = ["doubling_loss"]
    if measurement.package_ranks() == 1:
        known.append("package_bytes_per_second")
    if measurement.node_ranks == 1:
        known.append("node_bytes_per_second")
    if measurement.nodes == 1:
        known.append("network_bytes_per_second")
    else:
        known.append("hop_seconds / launch_seconds of the network")
    if measurement.on_gpu:
        known += ["workspace_gib", "head_multiple"]
        if measurement.ranks.world_size == 1:
            known.append("hidden_share")
    return known


def report_lines(
    measurement: Measurement, changes: dict[str, Any], missing: Sequence[str]
) -> list[str]:
    """Format what was found, beside the data sheet if the device is known."""
    like = measurement.like
    lines = [f"measured: {changes['measured']}"]
    for precision, rate in measurement.products.items():
        text = f"products in {precision}: {rate / 1e12:.4g} TFLOP/s"
        if measurement.sheet_flops and precision == "bf16":
            text += f", {rate / measurement.sheet_flops:.0%} of the data sheet's"
            text += f" {measurement.sheet_flops / 1e12:.4g}"
        lines.append(text)
    host = changes["host_bytes_per_second"] / 1e9
    optimizer = changes["optimizer_bytes_per_second"] / 1e9
    sheet = f" (data sheet {like.host_bytes_per_second / 1e9:.4g})" if measurement.on_gpu else ""
    lines.append(f"host link {host:.4g} GB/s{sheet}, AdamW {optimizer:.4g} GB/s")
    for link in changes["links"]:
        lines.append(link_line(link, like if measurement.sheet_flops else None))
    lines.append(f"from {like.name}, not measured: {', '.join(missing)}")
    return lines


def link_line(link: LinkSpeed, like: Machine | None) -> str:
    """Format the speed of one collective on one level."""
    text = f"{link.level:8}{link.kind:15}{link.bytes_per_second / 1e9:9.4g} GB/s"
    if like:
        sheet = getattr(like, f"{link.level}_bytes_per_second") / 1e9
        text += f" (data sheet {sheet:.4g})"
    launch = 1e6 * link.launch_seconds
    hop = 1e6 * link.hop_seconds
    return f"{text}, launch {launch:.0f} us, hop {hop:.0f} us"
