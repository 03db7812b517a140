"""What a run tells: log.jsonl for programs, lines on the terminal for people, both by rank 0."""

import json
import math
import os
import platform
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any, TextIO

import numpy as np
import torch
import torchvision
from torch import Tensor

import mesh
import shard
from runtime import agreement

# MAE's own recipe ends at 1.5e-4 x 4096 / 256 = 2.4e-3; above twice that AdamW tends to diverge.
LARGE_LR = 4.8e-3


class Log:
    """log.jsonl, one object a line, and the lines on the terminal; silent on all ranks but 0."""

    def __init__(self, file: TextIO | None) -> None:
        self.file = file

    def say(self, text: str) -> None:
        """A line for the terminal."""
        if self.file:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def write(self, event: str, **record: Any) -> None:
        """A line for log.jsonl; one that the disk refuses waits in memory, training goes on."""
        if self.file:
            clean = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in record.items()
            }  # JSON has no NaN
            text = json.dumps({"event": event, **clean}, ensure_ascii=False)
            # bytes of a file name that are no text, as the terminal shows them
            text = re.sub("[\ud800-\udfff]", lambda byte: rf"\\u{ord(byte[0]):04x}", text)
            try:
                self.file.write(text + "\n")
                self.file.flush()
            except OSError as error:
                self.warn(f"log.jsonl cannot be written now: {error}")

    def step(
        self,
        step: int,
        steps: int,
        *,
        loss: float | None,
        norm: Tensor | None,
        lr: float,
        epoch: int,
        seconds: float,
        waited: float,
        global_batch: int,
        world_size: int,
        flops_per_image: int | None,
        hardware_flops_per_image: int | None,
        peak_flops: float | None,
        device: torch.device,
        bad_images: int = 0,
    ) -> None:
        """One line for log.jsonl and one for the terminal; times in seconds a step.

        `loss`, `norm` and `flops_per_image` (of one image, forward and backward) are None where
        nothing is trained, `hardware_flops_per_image` (what is recomputed counts too) where nothing
        is recomputed.
        """
        rate = global_batch / seconds
        flops = rate * flops_per_image / world_size if flops_per_image else None
        memory = device_memory(device)
        grad_norm = None if norm is None else norm.item()
        self.write(
            "step",
            step=step + 1,
            epoch=epoch,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            step_seconds=seconds,
            data_seconds=waited,
            images_per_second=rate,
            images_per_second_per_rank=rate / world_size,
            tflops_per_rank=flops and flops / 1e12,
            hardware_tflops_per_rank=rate * hardware_flops_per_image / world_size / 1e12
            if flops and hardware_flops_per_image
            else None,
            mfu=flops / peak_flops if flops and peak_flops else None,
            **memory,
            bad_images=bad_images,
        )
        shown = ""
        if loss is not None:
            shown = f"loss {loss:7.4f}  norm {grad_norm:8.3f}  lr {lr:.2e}  "
        peak = memory["peak_allocated_gib"]
        left = timedelta(seconds=min(round(seconds * (steps - step - 1)), 10**9))
        self.say(
            f"step {step + 1:{len(str(steps))}}/{steps}  {shown}{rate:8.1f} img/s  "
            f"{'' if peak is None else f'{peak:6.2f} GiB  '}data wait {1e3 * waited:7.1f} ms "
            f"{waited / seconds:4.0%}  ETA {left}"
        )

    def skip(self, step: int, verdict: agreement.StepVerdict, images: list[str]) -> str:
        """A step that was not applied: which ranks, which images. Collective.

        `images` are the paths of this rank's part of the batch, or none where another rank's loss
        was at fault. Returns the sentence.
        """
        every = agreement.gather_to_rank0((verdict.mine, images)) or []
        ranks = [rank for rank, (mine, _) in enumerate(every) if mine]
        paths = [path for _, paths in every for path in paths]
        if verdict.loss:
            named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
            text = f"the loss is not finite at step {step + 1} on rank {named}"
        else:
            text = f"the gradient norm is not finite at step {step + 1}, though the losses are"
        if verdict.in_a_row > 1:
            text += f", {verdict.in_a_row} bad steps in a row"
        what = "loss" if verdict.loss else "gradient norm"
        self.write(
            "skip", step=step + 1, what=what, ranks=ranks, images=paths, in_a_row=verdict.in_a_row
        )
        more = f" and {len(paths) - 3} more, all in log.jsonl" if len(paths) > 3 else ""
        self.warn(f"{text}: not applied; images {', '.join(paths[:3])}{more}")
        return text


def device_memory(device: torch.device) -> dict[str, float | int | None]:
    """Peak GiB of this rank's GPU since the start, and how often the allocator had to retry."""
    names = ("peak_allocated_gib", "peak_reserved_gib", "alloc_retries")
    if device.type != "cuda":
        return dict.fromkeys(names)
    stats = torch.cuda.memory_stats(device)
    allocated = stats.get("allocated_bytes.all.peak", 0) / 2**30
    reserved = stats.get("reserved_bytes.all.peak", 0) / 2**30
    return dict(zip(names, (allocated, reserved, stats.get("num_alloc_retries", 0)), strict=True))


def open_log(out: str) -> Log:
    """Rank 0 makes the folder and opens the log to append; ValueError on all ranks if it cannot."""
    path, log = os.path.join(out, "log.jsonl"), Log(None)

    def try_it() -> None:
        os.makedirs(out, exist_ok=True)
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise ValueError(f"{path} is no regular file: move it away, or give another --out")
        log.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        with open(path, "rb") as old:
            size = old.seek(0, os.SEEK_END)
            old.seek(max(size - 1, 0))
            # the run before may have been killed while it wrote
            log.file.write("\n" if old.read().strip() else "")

    agreement.run_on_rank0(try_it)
    return log


def start_over(log: Log, out: str) -> None:
    """Give an earlier run's log another name, where this run begins at step 0. Collective.

    ValueError on all ranks where that cannot be done.
    """
    path = os.path.join(out, "log.jsonl")

    def rename() -> str | None:
        if log.file is None or not os.path.getsize(path):
            return None
        names = (os.path.join(out, f"log.{i}.jsonl") for i in count(1))
        other = next(name for name in names if not os.path.lexists(name))
        log.file.close()
        os.rename(path, other)
        log.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        return other

    if other := agreement.run_on_rank0(rename):
        log.say(f"note: this run begins at step 0; the log of an earlier one is now {other}")


def describe(start: dict[str, Any]) -> Iterator[str]:
    """The start record in lines for the terminal: what runs, its arithmetic, what to watch."""
    s, row, world = start, shard.STRATEGIES[start["mode"]], start["world_size"]
    copies, group = s["mesh"]["replicate"], s["mesh"]["shard"]
    gflop = s["flops_per_image"] / 1e9
    again = s["hardware_flops_per_image"]
    more = f", {again / 1e9:.1f} with what is recomputed" if again else ""
    yield f"{s['model']}: {s['params']:,} parameters, {gflop:.1f} GFLOP an image{more}"
    if s["sdpa"]:
        yield "attention: " + ", ".join(f"{part} {name}" for part, name in s["sdpa"].items())
        if "math" in s["sdpa"].values():
            yield "warning: no fused attention for these heads in this precision: it will be slow"
    yield f"{world} ranks on {s['device']}, mesh {copies} x {group} (replicate x shard)"
    traffic = row.traffic if world > 1 else "nothing to send"
    yield f"{s['mode']}: shards {row.shards}; a step: {traffic}"
    if mesh.straddles(group, s["local_world_size"]):
        node = s["local_world_size"]
        yield f"note: shard groups of {group} on nodes of {node}: gathers go over the network"
    yield f"batch: {s['batch']} images x {world} ranks x {s['accum']} steps = {s['global_batch']}"
    yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['lr']:.3g}, reached in step " + str(
        s["warmup_steps"] or 1
    )
    if s["lr"] > LARGE_LR:
        yield f"warning: lr {s['lr']:.3g} is very large (MAE's recipe: 2.4e-3); lower --blr"
    left = s["images"] % s["global_batch"]
    yield f"data: {s['data']}, {s['images']} images, {s['epoch_steps']} steps an epoch"
    if left:
        yield f"note: {left} images, others each time, are left out of an epoch"


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that decide about numbers and speed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
