"""What a run records: what it is, what its steps were, how it ended."""

import math
import platform
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import PIL
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import data
import mesh
import shard
import vit
from runtime import devices
from runtime.agreement import AgreedError, StepGuard, Verdict, gather_to_rank0, run_on_rank0
from runtime.device_batches import Batch, LoaderFailed
from runtime.log import BadImageLog, Meter
from runtime.resume import Saves, mark_done
from runtime.run import Run
from runtime.session import Session, cause_of

PLANNED = ("memory_gib", "payload_bytes", "verdict", "fit")  # what the start record has of a plan


def start_record(
    run: Run, device: torch.device, plan: Mapping[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """Describe a run for the log; `plan` is of devices.planned, `more` is added as it stands."""
    peak, peak_source = devices.peak_flops(device)
    gpu = device.type == "cuda" or bool(run.config.world_size and run.config.device != "cpu")
    with torch.device("meta"):
        model = vit.ViTMAE(run.model, run.config.img_size)
    facts = {
        "planned": plan and {key: plan[key] for key in PLANNED},
        "lr": run.lr,
        "epoch_steps": run.epoch_steps,
        "device": device.type,
        "mesh": dict(zip(mesh.DIMENSIONS, (*run.mesh_shape, 1), strict=False)),
        "params": sum(p.numel() for p in model.parameters()),
        "flops_per_image": run.flops_per_image(),
        "peak_flops_per_rank": peak,
        "peak_flops_source": peak_source,
        "precision_default": ": ".join(devices.default_precision(gpu)),
        "cpu_step_seconds": devices.cpu_step_seconds(run, device),
        "host": platform.node(),
        "versions": versions(),
    }
    return run.record() | facts | more


def versions() -> dict[str, str | None]:
    """List the versions of Python and of the packages that decide numbers and speed."""
    packages = {"torch": torch.__version__, "pillow": PIL.__version__, "numpy": np.__version__}
    gpu = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"python": platform.python_version(), **packages, **gpu}


def report_start(run: Run, session: Session, begin: int, workers: int) -> None:
    """Log the start record before step `begin`; rank 0 plans the run, and says what it will do."""
    device, log = session.device, session.log
    plan = devices.planned(run, device, log.warn) if session.ranks.rank == 0 else None
    start = start_record(run, device, plan, begin=begin, workers=workers)
    log.write("start", **start)
    log.say(*describe(start))


def losses_of_guesses(run: Run, images: Tensor, mask: Tensor) -> Tensor:
    """Compute what a model has to beat (2, B): the losses of predicting zero and a mean colour.

    The colour, one number per channel, is the mean of the patches that the image shows, as the loss
    sees them: with --norm-pix-loss each is normalised before, so that zero is its own mean grey.
    `images` (B, C, H, W) are normalised; of the `mask` (B, L) 1 is removed.
    """
    size, norm_pix = run.model.patch, run.config.norm_pix_loss
    target = vit.reconstruction_target(vit.patchify(images, size), norm_pix)
    by_channel = target.unflatten(-1, (-1, images.shape[1]))  # (B, L, P*P, C)
    shown = (1 - mask)[..., None, None] / (1 - mask[0]).sum()  # all images show equally many
    colour = (by_channel * shown).sum(1, keepdim=True).mean(2, keepdim=True)  # (B, 1, 1, C)
    guesses = torch.zeros_like(target), colour.expand_as(by_channel).flatten(2)
    losses = [vit.loss_of_each(images, guess, mask, size, norm_pix) for guess in guesses]
    return torch.stack(losses)


def baselines(run: Run, batch: Batch) -> dict[str, float]:
    """Average `losses_of_guesses` over a step's batch of all ranks, with its masks. Collective."""
    losses, kept = [], vit.kept_patches(run.patches, run.config.mask_ratio)
    for images, noise in batch.parts:
        images = data.normalize(images, run.channel_stats or data.IMAGENET)
        mask = (noise.argsort(1).argsort(1) >= kept).float()  # as of `ViTMAE.forward`
        losses.append(losses_of_guesses(run, images, mask).mean(1))
    mean = torch.stack(losses).mean(0).double() / run.world_size
    dist.all_reduce(mean)
    return dict(zip(("loss_of_zero", "loss_of_mean_colour"), mean.tolist(), strict=True))


def describe(start: dict[str, Any]) -> Iterator[str]:
    """Yield the start record as lines: what runs, its arithmetic, what to watch out for."""
    s, world, tp = start, start["world_size"], start["tp"]
    gflop = s["flops_per_image"] / 1e9
    yield f"{s['model']}: {s['params']:,} parameters, {gflop:.1f} GFLOP per image"
    yield f"precision: {s['precision']} (default {s['precision_default']})"
    shape = {name: size for name, size in s["mesh"].items() if name != "tp" or size > 1}
    sizes = " x ".join(map(str, shape.values()))
    yield f"{world} ranks on {s['device']}, mesh {sizes} ({' x '.join(shape)})"
    strategy = shard.STRATEGIES[s["mode"]]
    traffic = strategy.traffic if world > tp else "no communication"
    traffic = traffic if s["mesh"]["replicate"] > 1 else traffic.removesuffix(shard.ACROSS)
    yield f"{s['mode']}: shards {strategy.shards}; per step: {traffic}"
    who = f"{world // tp} groups of {tp} ranks" if tp > 1 else f"{world} ranks"
    yield f"batch: {s['batch']} images x {who} x {s['accum']} steps = {s['global_batch']}"
    warmup = s["warmup_steps"] or 1
    yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['lr']:.3g}, reached in step {warmup}"
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


# ---------------------------------------------------------------------------------------------
# Its steps, and its end


class Monitor:
    """Watch the steps of a run: the ranks' votes, the clock, unreadable images, the log."""

    def __init__(
        self, run: Run, session: Session, files: Any, saves: Saves, first: Batch | None = None
    ) -> None:
        """Begin before the step of `saves`, which has the batch `first`. Collective."""
        self.run, self.session, self.saves = run, session, saves
        skips = run.config.max_skips, saves.begin, saves.consecutive_bad
        self.guard = StepGuard(session.device, *skips)
        self.bad_images = BadImageLog(run, session.log, files.path)
        self.loaded, self.images_read = data.LoadStats(), 0
        self.error: Exception | None = None  # of this rank's data loader
        self.problem: str | None = None  # the last bad step, in a sentence
        self.image_ids: deque[list[int]] = deque(maxlen=2)  # of the last two steps
        self.losses: deque[float] = deque(maxlen=10)  # of the last steps
        self.baselines = baselines(run, first) if first else {}
        self.evaluation: Any = None  # called with the number of steps done ...
        self.evaluate_every = 0  # ... each time that so many are; 0: at each save
        self.profile: Any = None  # of a step_profile.RunProfile
        self.meter = Meter(saves.begin, run.global_batch)  # whose clock starts

    def watch(self, model: nn.Module, grid: DeviceMesh) -> None:
        """Evaluate the model and profile its steps too, where the flags ask for it. Collective."""
        config, session = self.run.config, self.session
        if config.eval_data and config.run_mode == "real":
            from runtime.evaluation import Evaluation

            self.evaluation = Evaluation(self.run, session, model)
        if config.profile and session.ranks.rank == 0:
            from runtime.step_profile import RunProfile

            self.profile = RunProfile(self.run, session, grid, self.meter)

    def next_batch(self, batches: Iterator[Batch], step: int) -> Batch:
        """Take the batch of a step: the last one again where the loader has failed."""
        self.session.heartbeat("reading data", step)
        with self.meter.data_wait():
            batch = next(batches)
        self.error = batch.error
        found = [(self.bad_images.name_of(i), why, step + 1) for i, why in batch.bad]
        self.bad_images.unreported += found
        self.loaded = data.total([self.loaded, batch.stats])
        self.images_read += len(batch.image_ids)
        self.image_ids.append(batch.image_ids)
        return batch

    def requests(self, batch: Batch) -> dict[str, bool]:
        """Return what this rank has to say in the vote of a step, as of `StepGuard.vote`."""
        return {
            "stop": bool(self.session.signals),
            "save": self.saves.due_by_clock(),
            "no_batch": batch.error is not None,
            "bad_images": bool(self.bad_images.unreported),
        }

    def settle(self, wait: bool) -> Iterator[Verdict]:
        """Yield the verdicts of the steps that were applied, after reporting bad steps. Collective.

        With `wait` up to the last step, otherwise those that need no waiting.
        """
        for verdict in self.guard.settle(wait):
            if verdict.consecutive and not verdict.no_batch:
                self.problem = self.log_skip(verdict)
            if self.guard.ended and verdict.step == self.guard.done:
                return
            self.losses.append(verdict.loss)
            yield verdict
        if self.bad_images.too_many and not wait:  # the run ends: save what is applied by now
            yield from self.settle(wait=True)

    def log_skip(self, verdict: Verdict) -> str:
        """Log a step that was not applied, and its images; return a message. Collective."""
        ids = self.image_ids[verdict.step - self.guard.voted]  # -1: the last step
        at_fault = verdict.own_loss or not verdict.bad_loss
        every = gather_to_rank0([self.bad_images.name_of(i) for i in ids] if at_fault else []) or []
        paths = [path for images in every for path in images]
        # a norm is of all ranks
        ranks = [rank for rank, images in enumerate(every) if images and verdict.bad_loss]
        what, step = "loss" if verdict.bad_loss else "gradient norm", verdict.step + 1
        text = f"the {what} is not finite at step {step}"
        if ranks:
            text += f" on rank {', '.join(map(str, ranks))}"
        if verdict.consecutive > 1:
            text += f", {verdict.consecutive} consecutive bad steps"
        found = {"what": what, "ranks": ranks, "images": paths}
        self.session.log.write("skip", step=step, **found, consecutive_bad=verdict.consecutive)
        self.session.log.warn(f"{text}: optimizer step skipped; images {', '.join(paths[:3])} ...")
        return text

    def log_step(self, verdict: Verdict, lr: float) -> None:
        """Log a step that has a line, and the bad images of all ranks since. Collective."""
        done, run, log = verdict.step + 1, self.run, self.session.log
        if done == run.steps or done % run.config.log_every == 0:
            with self.meter.paused():
                if verdict.bad_images:
                    self.bad_images.sync()
            log.step(verdict, lr, self.meter, self.bad_images.count)
        elif verdict.step == self.saves.begin and run.config.run_mode != "io":
            # a sign of life: the first line may be minutes away
            log.say(f"first step: {done} of {run.steps}, loss {verdict.loss:.4f}")

    def finish(self, reason: str, problem: str | None, **more: Any) -> None:
        """Save, log how the loop has ended, and `more`; AgreedError if it failed. Collective."""
        guard, saves, session = self.guard, self.saves, self.session
        if reason == "data":
            problem = self.loader_error()
        session.heartbeat("saving")
        if reason == "nan":  # before the first of the bad steps, which the same command meets again
            saves.save_last(guard.done + 1 - guard.consecutive, 0)
        elif reason == "data":
            saves.save_last(guard.done, guard.consecutive)
        session.heartbeat("ending")
        self.bad_images.sync()  # what was found since the last log line
        self.report_end(reason, problem, more)
        if self.run.config.run_mode == "real":
            session.log.say(saves.where(reason == "done"))
            if reason == "done":
                mark_done(self.run.config.out, True)
        if problem and reason == "nan":
            problem += ": lower --blr, add --clip 1, or look at the images of that step"
        if problem:
            raise AgreedError(problem)

    def loader_error(self) -> str:
        """Return the error of the first rank whose loader has failed, on all. Collective."""
        if self.error and not isinstance(self.error, LoaderFailed):
            traceback.print_exception(self.error)  # a bug
        errors = gather_to_rank0(self.error and cause_of(self.error)) or []
        rank, text = run_on_rank0(lambda: next(pair for pair in enumerate(errors) if pair[1]))
        where = f"reading data in step {self.guard.done + 1}"
        return f"rank {rank}: the data loader failed ({where}): {text}"

    def report_end(self, reason: str, problem: str | None, more: dict[str, Any]) -> None:
        """Write the records `io` and `end`, and a summary to the terminal. Collective."""
        log, guard, out = self.session.log, self.guard, self.run.config.out
        end: dict[str, Any] = {"reason": reason, "problem": problem, "steps": guard.done}
        end |= {"skipped": guard.skipped, "bad_images": self.bad_images.count}
        end |= self.meter.summary() | devices.device_memory(self.session.device) | more
        end["payload_bytes"] = self.profile.payload_bytes() if self.profile else None
        log.write("io", ranks=self.input_rates(end["seconds"], end["data_share"]))
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        if reason == "done" and losses and self.run.config.run_mode != "io":
            end |= {"loss": sum(losses) / len(losses)} | self.baselines
            text = "; predicting zero gives {:.4f}, the mean colour of the visible patches {:.4f}"
            text = text.format(*self.baselines.values()) if self.baselines else ""
            log.say(f"mean loss of the last {len(losses)} steps {end['loss']:.4f}{text}")
        log.write("end", **end)
        log.say(
            f"{reason}: {guard.done - self.saves.begin} steps in {end['seconds']:.1f} s, median "
            f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time "
            f"waiting for data; log in {out}/log.jsonl"
        )

    def input_rates(self, seconds: float, waiting: float) -> list[dict[str, float]]:
        """Gather on rank 0 what each rank's loader did in the loop's `seconds`. Collective.

        `waiting` is the share of them in which this rank had no batch. Reading and decoding are in
        seconds per image, of the workers together: which of the two limits the input.
        """
        count = max(self.images_read, 1)
        row = {
            "images_per_second": self.images_read / seconds,
            "mb_per_second": self.loaded.bytes / seconds / 1e6,
            "data_share": waiting,
            "read_seconds": self.loaded.read_seconds / count,
            "decode_seconds": self.loaded.decode_seconds / count,
        }
        return gather_to_rank0(row) or []
