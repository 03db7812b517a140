"""What a run records: what it is, what its steps were, how it ended."""

import math
import os
import platform
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import data
import mesh
import shard
import vit
from runtime import devices
from runtime.agreement import AgreedError, StepGuard, Verdict, mean_over_ranks
from runtime.bad_images import BadImageLog, describe_loaders
from runtime.device_batches import Batch
from runtime.devices import device_memory, peak_flops, planned
from runtime.log import Meter, compile_seconds
from runtime.process import TORCHRUN_NOTE
from runtime.resume import Saves, mark_done
from runtime.run import Run
from runtime.session import Session

# MAE's own recipe ends at 1.5e-4 x 4096 / 256 = 2.4e-3; above twice that AdamW tends to diverge.
LARGE_LR = 4.8e-3
PLANNED = (  # what the start record has of a plan
    *("memory_gib", "payload_bytes", "traffic_bytes_per_rank", "step_seconds_lower_bound"),
    *("verdict", "fit"),
)


def start_record(
    run: Run, ranks: mesh.Ranks, device: torch.device, plan: Mapping[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """Describe a run for the log: its flags, what follows from them, its plan, its machine.

    `plan` is that of devices.planned; `more` is added as it stands: begin, workers.
    """
    peak, peak_source = peak_flops(device)
    planned_gpu = bool(run.config.world_size) and run.config.device != "cpu"
    precision = devices.default_precision(planned_gpu or device.type == "cuda")
    with torch.device("meta"):
        model = vit.ViTMAE(run.model, run.config.img_size)
    facts = {
        "planned": plan and {key: plan[key] for key in PLANNED},
        "lr": run.lr,
        "epoch_steps": run.epoch_steps,
        "launcher": ranks.launcher,
        "local_world_size": ranks.local_world_size,
        "device": device.type,
        "mesh": dict(zip(mesh.DIMENSIONS, (*run.mesh_shape, 1), strict=False)),
        "params": sum(p.numel() for p in model.parameters()),
        "flops_per_image": run.flops_per_image(),
        "hardware_flops_per_image": run.flops_per_image(recomputed=True),
        "peak_flops_per_rank": peak,
        "peak_flops_source": peak_source,
        "precision_default": ": ".join(precision),
        "cpu_step_seconds": devices.cpu_step_seconds(run, device),
        "host": platform.node(),
        "versions": versions(),
    }
    return run.record() | facts | more


def report_start(run: Run, session: Session, begin: int, workers: int) -> None:
    """Log the start record before step `begin`; rank 0 plans the run, and says what it will do."""
    ranks, device, log = session.ranks, session.device, session.log
    log.begin(run, device, begin)
    plan = planned(run, device, log.warn) if ranks.rank == 0 else None
    start = start_record(run, ranks, device, plan, begin=begin, workers=workers)
    log.write("start", **start)
    log.say_all(describe(start))


def loss_of_zero(batch: Batch, run: Run) -> Tensor | None:
    """Compute the loss () of predicting zero for every patch: what a model has to beat."""
    if not batch.parts:
        return None
    images = data.normalize(batch.parts[0][0], run.channel_stats or data.IMAGENET)
    patches = vit.patchify(images, run.model.patch)
    target = vit.reconstruction_target(patches, run.config.norm_pix_loss)
    return target.square().mean()


def describe(start: dict[str, Any]) -> Iterator[str]:
    """Yield the start record as lines: what runs, its arithmetic, what to watch out for."""
    s, world, node = start, start["world_size"], start["local_world_size"]
    tp, again = s["mesh"]["tp"], s["hardware_flops_per_image"]
    shape = {name: size for name, size in s["mesh"].items() if name != "tp" or size > 1}
    more = f", {again / 1e9:.1f} with recomputation" if again else ""
    gflop = f"{s['flops_per_image'] / 1e9:.1f} GFLOP per image{more}"
    yield f"{s['model']}: {s['params']:,} parameters, {gflop}"
    yield f"precision: {s['precision']} (default {s['precision_default']})"
    sizes = " x ".join(map(str, shape.values()))
    yield f"{world} ranks on {s['device']}, mesh {sizes} ({' x '.join(shape)})"
    strategy = shard.STRATEGIES[s["mode"]]
    traffic = strategy.traffic if world > tp else "no communication"
    yield f"{s['mode']}: shards {strategy.shards}; per step: {traffic}"
    for what, ranks in (("shard groups", s["mesh"]["shard"] * tp), ("--tp", tp)):
        if node % ranks:
            yield f"note: {what} of {ranks} ranks on nodes of {node}: they wait for the network"
    who = f"{world // tp} groups of {tp} ranks" if tp > 1 else f"{world} ranks"
    yield f"batch: {s['batch']} images x {who} x {s['accum']} steps = {s['global_batch']}"
    warmup = s["warmup_steps"] or 1
    yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['lr']:.3g}, reached in step {warmup}"
    if s["lr"] > LARGE_LR:
        yield f"warning: lr {s['lr']:.3g} is very large (MAE's recipe: 2.4e-3); lower --blr"
    if s["planned"] and s["planned"]["verdict"]:
        sign = "" if s["planned"]["verdict"] == "FITS" else "warning: "
        yield f"{sign}plan: {s['planned']['fit']}"
    if s["device"] == "cpu" and (s["cpu_step_seconds"] or 0) > 5:
        yield (
            f"note: a step takes about {s['cpu_step_seconds']:.0f} s on this CPU; a smaller run: "
            "python train_fsdp.py --model tiny --img-size 96 --out out/tiny"
        )
    left = s["images"] % s["global_batch"]
    unused = f"; {left} images, others each time, are left out of each" if left else ""
    yield f"data: {s['data']}, {s['images']} images, {s['epoch_steps']} steps per epoch{unused}"
    whose = "ImageNet" if s["channel_mean"] == data.IMAGENET.mean else "the images"
    yield f"pixels: {s['channels']} channels of {s['image_dtype']}, mean and deviation of {whose}"


def versions() -> dict[str, str | None]:
    """List the versions of Python and of the packages that decide numbers and speed."""
    packages = {"torch": torch.__version__, "pillow": PIL.__version__, "numpy": np.__version__}
    gpu = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"python": platform.python_version(), **packages, **gpu}


# ---------------------------------------------------------------------------------------------
# Its steps, and its end


class Monitor:
    """Watch the steps of a run: the ranks' votes, the clock, unreadable images, the log."""

    def __init__(self, run: Run, session: Session, files: Any, saves: Saves, first: Batch) -> None:
        """Begin before the step of `saves`; `first` is the batch of that step. Collective."""
        config, self.run, self.session = run.config, run, session
        self.guard = StepGuard(session.device, config.max_skips)
        self.guard.begin(saves.begin, saves.consecutive_bad)
        self.meter = Meter(saves.begin, run.global_batch)
        self.bad_images = BadImageLog(
            config.out, run.images, config.max_bad, session.log, files.path
        )
        self.begin, self.compiled = saves.begin, compile_seconds()
        self.error: Exception | None = None  # of this rank's data loader
        self.problem: str | None = None  # the last bad step, in a sentence
        self.image_ids: deque[list[int]] = deque(maxlen=2)  # of the last two steps
        zero = None if config.run_mode == "io" else loss_of_zero(first, run)
        self.loss_of_zero = None if zero is None else mean_over_ranks(zero[None])[0]
        self.evaluation: Any = None  # called with the number of steps where its `due` says so
        self.profile: Any = None
        self.end_record: dict[str, float] = {}  # what the end record has besides

    def watch(self, model: nn.Module, grid: DeviceMesh) -> None:
        """Evaluate the model and profile its steps too, where the flags ask for it. Collective."""
        config, session = self.run.config, self.session
        if config.eval_data and config.run_mode == "real":
            from runtime.evaluation import Evaluation

            self.evaluation = Evaluation(self.run, session, model)
        if config.profile and session.ranks.rank == 0:
            from runtime.step_profile import RunProfile

            self.profile = RunProfile(self.run, session, grid, self.meter)

    def profiled(self, step: int) -> AbstractContextManager[Any]:
        """Surround a step, which --profile may look at."""
        return self.profile.step(step) if self.profile else nullcontext()

    def next_batch(self, batches: Iterator[Batch], step: int) -> Batch:
        """Take the batch of a step: the last one again where the loader has failed."""
        self.session.heartbeat("reading data", step)
        with self.meter.data_wait():
            batch = next(batches)
        self.error = batch.error
        self.bad_images.record(step, batch)
        self.image_ids.append(batch.image_ids)
        return batch

    def asked(self, batch: Batch) -> dict[str, bool]:
        """Return what this rank has to say in the vote of a step, as of `StepGuard.vote`."""
        return {
            "stop": self.session.stop_requested(),
            "no_batch": batch.error is not None,
            "bad_images": self.bad_images.pending,
        }

    @property
    def too_many(self) -> str | None:
        """Say that too many images are unreadable; None where they are not."""
        return self.bad_images.too_many

    def settle(self, wait: bool) -> Iterator[Verdict]:
        """Yield the verdicts of the steps that were applied, after reporting bad steps. Collective.

        With `wait` up to the last step, otherwise those that need no waiting.
        """
        for verdict in self.guard.settle(wait):
            if verdict.consecutive:
                ids = self.image_ids[verdict.step - self.guard.voted]  # -1: the last step
                at_fault = verdict.own_loss or not verdict.bad_loss
                self.problem = self.bad_images.log_skipped_step(verdict, ids if at_fault else [])
            if self.guard.ended and verdict.step == self.guard.done:
                return
            self.meter.losses.append(verdict.loss)
            yield verdict
        if self.too_many and not wait:  # the run ends: save what is applied by now
            yield from self.settle(wait=True)

    def log_due(self, verdict: Verdict) -> bool:
        """Tell whether a step has a line in the log; say that the first step is made."""
        step = verdict.step + 1
        due = step == self.run.steps or step % self.run.config.log_every == 0
        if verdict.step == self.begin and not due:
            self.session.log.first_step(verdict.step, verdict.loss)
        return due

    def log_step(self, verdict: Verdict, lr: float) -> None:
        """Log a step, and the bad images of all ranks since the last line. Collective."""
        with self.meter.paused():
            if verdict.bad_images:
                self.bad_images.sync()
        self.session.log.step(
            verdict.step, verdict.loss, verdict.norm, lr, self.meter, self.bad_images
        )

    def finish(self, saves: Saves, ended: tuple[str, str | None]) -> str | None:
        """Save what is not saved, log how the run ended; return its error message. Collective.

        `ended` is what the training loop returned.
        """
        (reason, problem), guard, session = ended, self.guard, self.session
        if reason == "data":
            problem = session.first_loader_error(self.error, guard.done)
        session.heartbeat("saving")
        if reason == "nan":  # the same command meets the bad steps again
            saves.save_last(guard.done + 1 - guard.consecutive, 0)
        elif reason == "data":
            saves.save_last(guard.done, guard.consecutive)
        session.heartbeat("ending")
        self.bad_images.sync()  # what was found since the last log line
        if reason == "done" and saves.saver:
            try:
                mark_done(self.run.config.out, True)
            except AgreedError as error:
                problem = str(error)
        self.report_end(reason, problem)
        if saves.saver:
            session.log.say(saves.where(reason == "done"))
        if "TORCHELASTIC_RUN_ID" in os.environ and reason == "signal":
            session.log.say(TORCHRUN_NOTE)
        advice = {"nan": ": lower --blr, add --clip 1, or look at the images of that step"}
        return problem and problem + advice.get(reason, "")

    def report_end(self, reason: str, problem: str | None) -> None:
        """Write the records `io` and `end`, and a summary to the terminal. Collective."""
        run, log, meter, guard = self.run, self.session.log, self.meter, self.guard
        end: dict[str, Any] = {"reason": reason, "problem": problem, "steps": guard.done}
        end |= {"skipped": guard.skipped, "bad_images": self.bad_images.count}
        end |= meter.summary() | device_memory(self.session.device) | self.end_record
        compiled = compile_seconds() - self.compiled if run.config.compile else None
        sent = self.profile.payload_bytes() if self.profile else None
        end |= {"compile_seconds": compiled, "payload_bytes": sent}
        loaders = self.bad_images.report(end["seconds"], end["data_share"])
        log.write("io", **loaders)
        if run.config.run_mode == "io" and loaders:
            log.say_all(describe_loaders(loaders["ranks"]))
        losses = [loss for loss in meter.losses if math.isfinite(loss)]
        if reason == "done" and losses and self.loss_of_zero is not None:
            end |= {"loss": sum(losses) / len(losses), "loss_of_zero": self.loss_of_zero}
            log.say(
                f"mean loss of the last {len(losses)} steps {end['loss']:.4f}; predicting zero "
                f"gives {self.loss_of_zero:.4f}"
            )
        log.write("end", **end)
        log.say(
            f"{reason}: {guard.done - self.begin} steps in {end['seconds']:.1f} s, median "
            f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time "
            f"waiting for data; log in {os.path.join(run.config.out, 'log.jsonl')}"
        )
