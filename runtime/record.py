"""What a run records: what it is, what its steps were, how it ended."""

import atexit
import gzip
import json
import os
import platform
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile, record_function, schedule

import data
import mesh
import shard
import vit
from runtime import devices
from runtime.agreement import AgreedError, StepGuard, StepResult, gather_to_rank0, run_on_rank0
from runtime.device_batches import Batch, worker_count
from runtime.log import BadImageLog, Meter
from runtime.resume import Saves, mark_done
from runtime.run import Run
from runtime.session import Session, cause_of


def start_record(
    run: Run, device: torch.device | None, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Describe a run for the log. A device of None is some GPU."""
    peak, peak_source = devices.peak_flops(device)
    on_gpu = device is None or device.type == "cuda"
    with torch.device("meta"):
        model = vit.ViTMAE(run.model, run.config.img_size)
    return run.record() | {
        "planned": devices.planned(run, device, warn),
        "lr": run.lr,
        "epoch_steps": run.epoch_steps,
        "device": "cuda" if on_gpu else "cpu",
        "mesh": dict(zip(mesh.DIMENSIONS, (*run.mesh_shape, 1), strict=False)),
        "params": sum(p.numel() for p in model.parameters()),
        "flops_per_image": run.flops_per_image(),
        "peak_flops_per_rank": peak,
        "peak_flops_source": peak_source,
        "precision_default": ": ".join(devices.default_precision(on_gpu)),
        "cpu_step_seconds": devices.cpu_step_seconds(run, device),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """List the versions that decide numbers and speed."""
    gpu = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"python": platform.python_version(), "torch": torch.__version__} | gpu


def report_start(run: Run, session: Session, begin: int) -> None:
    """Log the start record before step `begin`; print what will run, and where. Collective."""
    rows = gather_to_rank0(table_row(run, session))
    if rows:  # on rank 0
        log = session.log
        start = start_record(run, session.device, log.warn)
        start |= {"begin": begin, "workers": worker_count(run.config.workers, session.ranks)}
        log.write("start", **start)
        log.say(*describe(start))
        if len(rows) > 1:
            names = "".join(f"{name:>11}" for name in mesh.DIMENSIONS[: len(run.mesh_shape)])
            log.say(f"rank  local  device{names}  host", *rows[:32])


def table_row(run: Run, session: Session) -> str:
    """Format where this rank runs: on its node, in the mesh."""
    ranks, host = session.ranks, os.environ.get("SLURMD_NODENAME") or platform.node()
    grid = torch.arange(run.world_size).view(run.mesh_shape)
    (place,) = (grid == ranks.rank).nonzero().tolist()
    cells = "".join(f"{number:11}" for number in place)
    return f"{ranks.rank:4}  {ranks.local_rank:5}  {session.device!s:6}{cells}  {host}"


def describe(start: dict[str, Any]) -> Iterator[str]:
    """Yield the start record as lines: what runs, its arithmetic, what to watch out for."""
    s, ranks = start, start["world_size"]
    gflop, strategy = s["flops_per_image"] / 1e9, shard.STRATEGIES[s["mode"]]
    yield f"{s['model']}: {s['params']:,} parameters, {gflop:.1f} GFLOP per image"
    yield f"precision: {s['precision']} (default here {s['precision_default']})"
    shape = {name: size for name, size in s["mesh"].items() if name != "tp" or size > 1}
    sizes = " x ".join(map(str, shape.values()))
    yield f"{ranks} ranks on {s['device']}, mesh {sizes} ({' x '.join(shape)})"
    traffic = strategy.traffic if ranks > s["tp"] else "nothing between data-parallel ranks"
    traffic = traffic if s["mesh"]["replicate"] > 1 else traffic.removesuffix(shard.ACROSS)
    if s["wrap"] == "root":  # which stays gathered until backward
        traffic = traffic.replace(shard.GATHER2, shard.GATHER1)
    yield f"{s['mode']}: shards {strategy.shards}; per step: {traffic}"
    who = f"{ranks // s['tp']} data-parallel ranks"
    yield f"batch: {s['batch']} images x {who} x {s['accum']} steps = {s['global_batch']}"
    yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['lr']:.3g}"
    if s["planned"] and s["planned"]["verdict"]:
        yield f"plan for {s['planned']['machine']}: {s['planned']['fit']}"
    if (s["cpu_step_seconds"] or 0) > 5:
        yield (
            f"note: a step takes about {s['cpu_step_seconds']:.0f} s on this CPU; a smaller run: "
            "python train_fsdp.py --model tiny --img-size 96 --out out/tiny"
        )
    yield f"data: {s['data']}, {s['images']} images, {s['epoch_steps']} steps per epoch"
    mean = ", ".join(f"{value:.5g}" for value in s["channel_mean"] or ())
    yield f"pixels: {s['channels']} channels of {s['image_dtype']}, mean {mean}"


# --- Baselines: the losses that a model has to beat


def losses_of_guesses(run: Run, images: Tensor, mask: Tensor) -> Tensor:
    """Compute what a model has to beat (2, B): the losses of predicting zero and a mean colour.

    The colour, one number per channel, is the mean of the patches that the image shows, as the loss
    sees them: with --norm-pix-loss each is normalised before, so that zero is its own mean grey.
    `images` (B, C, H, W) are normalised; of the `mask` (B, L) 1 is removed.
    """
    size, norm_pix = run.model.patch, run.config.norm_pix_loss
    target = vit.reconstruction_target(vit.patchify(images, size), norm_pix)  # (B, L, P*P*C)
    shown = (1 - mask)[..., None] / (1 - mask[0]).sum()  # all images show equally many
    pixels = (target * shown).sum(1, keepdim=True).unflatten(-1, (-1, images.shape[1]))
    colour = pixels.mean(2).repeat(1, 1, size**2)  # (B, 1, P*P*C), the same for each patch
    guesses = torch.zeros_like(colour), colour
    return torch.stack([vit.loss_of_each(images, g, mask, size, norm_pix) for g in guesses])


def baselines(run: Run, batch: Batch) -> dict[str, float]:
    """Average `losses_of_guesses` over a step's batch of all ranks, with its masks. Collective."""
    losses, kept = [], vit.kept_patches(run.patches, run.config.mask_ratio)
    for images, noise in batch.parts:
        images = data.normalize(images, run.channel_stats or data.IMAGENET)
        mask = (noise.argsort(1).argsort(1) >= kept).float()  # as of `ViTMAE.forward`
        losses.append(losses_of_guesses(run, images, mask).mean(1))
    mean = torch.stack(losses).mean(0) / run.world_size
    dist.all_reduce(mean)
    return dict(zip(("loss_of_zero", "loss_of_mean_colour"), mean.tolist(), strict=True))


# --- Its profile

WARM = 5  # steps before those profiled: blocks are compiled, memory settles


class RunProfile:
    """Profile some steps of this process; the loop calls `step` after each of its steps."""

    def __init__(self, run: Run, session: Session, meter: Meter) -> None:
        """Start the profiler's schedule; the meter's clock stops while it starts and writes."""
        self.log, self.meter, self.first_step = session.log, meter, meter.begin + WARM + 1
        folder, on_cpu = Path(run.config.out, "profile"), session.device.type == "cpu"
        self.trace, self.table = folder / "rank_00000.json.gz", folder / "rank_00000.txt"
        self.sort_by = "self_cpu_time_total" if on_cpu else "self_device_time_total"
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints lines of its own
        # in the step before the first it is slow: it begins
        plan = schedule(wait=WARM - 1, warmup=1, active=run.config.profile or 1, repeat=1)
        self.profiler = profile(schedule=plan, on_trace_ready=self._write, acc_events=True)
        self.profiler.start()
        atexit.register(self.profiler.stop)  # a run that ends while it records would crash

    def step(self) -> None:
        """End one step, its wait for data included."""
        with self.meter.paused():
            self.profiler.step()

    def _write(self, profiler: profile) -> None:
        """Write a trace, for https://ui.perfetto.dev, and a table of the slowest operators."""
        try:
            self.trace.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self.trace))
            with gzip.open(self.trace) as file:
                json.load(file)  # PyTorch says nothing of a full disk
            averages = profiler.key_averages()
            self.table.write_text(averages.table(sort_by=self.sort_by, row_limit=20))
        except (OSError, ValueError, RuntimeError) as error:  # a full disk: training continues
            self.log.warn(f"no profile: {type(error).__name__}: {error}")
            return
        self.log.write("profile", first_step=self.first_step)
        self.log.say(f"profile from step {self.first_step}, in {self.trace} and {self.table}")


# --- Its steps, and its end


class Monitor:
    """Watch the steps of a run: what the ranks agree on, the clock, unreadable images, the log."""

    def __init__(
        self, run: Run, session: Session, files: Any, saves: Saves, batches: Iterator[Batch]
    ) -> None:
        """Begin before the step of `saves`, whose batch is the first of `batches`."""
        self.run, self.session, self.saves = run, session, saves
        self.batches, self.batch = batches, next(batches)
        self.guard = StepGuard(session.device, run.config.max_skips, saves.begin)
        self.bad_images = BadImageLog(run, session.log, files.path)
        self.error: Exception | None = None  # of this rank's data loader
        self.problem: str | None = None  # the last bad step, in a sentence
        self.losses: deque[float] = deque(maxlen=10)  # of the last good steps
        self.baselines: dict[str, float] = {}
        self.evaluation: Any = None  # called with the number of steps done ...
        self.evaluate_every = 0  # ... each time that so many are; 0: at each save
        self.profile: RunProfile | None = None  # on rank 0, with --profile
        self.meter = Meter(saves.begin, run.global_batch)  # whose clock starts

    def watch(self, model: nn.Module) -> None:
        """Compute the baselines; evaluate, and profile the steps, where asked for. Collective."""
        config, session = self.run.config, self.session
        with self.meter.paused():
            self.baselines = baselines(self.run, self.batch)
        if config.eval_data and config.run_mode == "real":
            from runtime.evaluation import Evaluation

            self.evaluation = Evaluation(self.run, session, model)
        if config.profile and session.ranks.rank == 0:
            if self.saves.begin + WARM < self.run.steps:
                self.profile = RunProfile(self.run, session, self.meter)
            else:
                session.log.warn("--profile: too few steps are left")

    def next_batch(self, step: int) -> Batch:
        """Take the batch of a step; once the loader has failed, the last one again.

        All ranks learn of the failure together, as the step is checked: none waits for this one.
        """
        self.session.heartbeat("reading data", step)
        start = time.perf_counter()
        try:
            with record_function("wait for data"):  # the name in a profiler's trace
                if step > self.saves.begin and not self.error:  # the first is here
                    self.batch = next(self.batches)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # of the GPU, not the loader
            raise
        except Exception as error:
            self.error = error
        self.meter.waited += time.perf_counter() - start
        if not self.error:
            found = [(self.bad_images.name_of(i), why, step + 1) for i, why in self.batch.bad]
            self.bad_images.unreported += found
        return self.batch

    def requests(self) -> dict[str, bool]:
        """Return what this rank asks for in a step, as of `StepGuard.check_step`."""
        return {
            "stop": bool(self.session.signals),
            "save": self.saves.due_by_clock(),
            "no_batch": self.error is not None,
            "bad_images": bool(self.bad_images.unreported),
        }

    def settle(self, wait: bool) -> Iterator[StepResult]:
        """Yield the results of the steps that were applied, after reporting bad steps. Collective.

        With `wait` up to the last step, otherwise those that need no waiting.
        """
        for result in self.guard.read_results(wait):
            if result.consecutive and not result.no_batch:
                self.problem = self.log_skip(result)
            if self.guard.ended and result.step == self.guard.done:
                return
            if not result.consecutive:
                self.losses.append(result.loss)
            yield result
        if self.bad_images.too_many and not wait:  # the run ends: save what is applied by now
            yield from self.settle(wait=True)

    def log_skip(self, result: StepResult) -> str:
        """Log a step that was not applied; return a message. Collective."""
        own_losses = gather_to_rank0(result.local_loss_nonfinite) or []
        ranks = [rank for rank, bad in enumerate(own_losses) if bad]
        what, step = "loss" if result.bad_loss else "gradient norm", result.step + 1
        text = f"the {what} is not finite at step {step}"
        if ranks:  # a norm is of all
            text += f" on rank {', '.join(map(str, ranks))}"
        found = {"what": what, "ranks": ranks, "consecutive_bad": result.consecutive}
        self.session.log.write("skip", step=step, **found)
        self.session.log.warn(f"{text}: optimizer step skipped")
        return f"{text}: lower --blr or add --clip 1, with --allow-changes"

    def log_step(self, result: StepResult, lr: float) -> None:
        """Log a step that has a line, and the bad images of all ranks since. Collective."""
        done = result.step + 1
        if done == self.run.steps or done % self.run.config.log_every == 0:
            with self.meter.paused():
                if result.bad_images:
                    self.bad_images.sync()
            self.session.log.step(result, lr, self.meter)

    def finish(self, reason: str, problem: str | None) -> None:
        """Save, and log how the loop has ended; AgreedError if it failed. Collective."""
        guard, saves, session = self.guard, self.saves, self.session
        session.heartbeat("saving")
        if reason == "nan":  # before the first of the bad steps, which the same command meets again
            saves.save_last(guard.done + 1 - guard.consecutive)
        if reason == "loader_error":
            problem = self.loader_error()
            saves.save_last(guard.done)
        self.bad_images.sync()  # what was found since the last log line
        self.report_end(reason, problem)
        if self.run.config.run_mode == "real":
            # after a NaN or too many bad images something is to be changed first
            session.log.say(saves.where(reason in ("done", "nan", "bad_images")))
            if reason == "done":
                mark_done(self.run.config.out, True)
        if problem:
            raise AgreedError(problem)

    def loader_error(self) -> str:
        """Return the error of the first rank whose loader has failed, on all. Collective."""
        if self.error and not isinstance(self.error, (OSError, RuntimeError)):  # a bug
            traceback.print_exception(self.error)
        errors = gather_to_rank0(self.error and cause_of(self.error)) or []
        rank, text = run_on_rank0(lambda: next(pair for pair in enumerate(errors) if pair[1]))
        where = f"reading data in step {self.guard.done + 1}"
        return f"rank {rank}: the data loader failed ({where}): {text}"

    def report_end(self, reason: str, problem: str | None) -> None:
        """Write the record `end`, and a summary to the terminal."""
        log, guard = self.session.log, self.guard
        end: dict[str, Any] = {"reason": reason, "problem": problem, "steps": guard.done}
        end |= {"skipped": guard.skipped, "bad_images": len(self.bad_images.known)}
        end |= self.meter.summary() | devices.device_memory(self.session.device)
        if self.losses and self.run.config.run_mode != "io":
            end |= {"loss": sum(self.losses) / len(self.losses)} | self.baselines
            text = "; predicting zero gives {:.4f}, the mean colour of the visible patches {:.4f}"
            text = text.format(*self.baselines.values()) if self.baselines else ""
            log.say(f"mean loss of the last {len(self.losses)} steps {end['loss']:.4f}{text}")
        log.write("end", **end)
        log.say(
            f"{reason}: {guard.done - self.saves.begin} steps in {end['seconds']:.1f} s, median "
            f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time "
            f"waiting for data; log in {self.run.config.out}/log.jsonl"
        )
