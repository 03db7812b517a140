"""The steps of a run and its end: batches, what the ranks agreed on, the log."""

import time
import traceback
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from runtime import devices
from runtime.agreement import AgreedError, StepGuard, StepRequests, StepResult, gather_to_rank0
from runtime.device_batches import Batch
from runtime.evaluation import average_baselines, open_evaluation
from runtime.limits import LimitWarning
from runtime.log import BadImageLog, Meter
from runtime.profiling import WARM, RunProfile
from runtime.resume import CheckpointSchedule, mark_done
from runtime.run import Run
from runtime.session import Session, cause_of

BAD_IMAGES_EVERY = 10  # steps after which too many bad images end the run, at the latest


class Monitor:
    """Watch the steps of a run: what the ranks agree on, the clock, unreadable images, the log."""

    def __init__(
        self,
        run: Run,
        session: Session,
        files: Any,
        checkpoints: CheckpointSchedule,
        *,
        first: Batch,
        rest: Iterator[Batch],
    ) -> None:
        """Begin with the batch `first`, of step `checkpoints.begin`; `rest` are those after it."""
        self.run = run
        self.session = session
        self.checkpoints = checkpoints
        self.batch = first
        # an iterator over one batch, not a list of it, which would keep that batch in memory
        self.batches = chain(iter([first]), rest)
        self.guard = StepGuard(session.device, run.config.max_skips, checkpoints.begin)
        self.bad_images = BadImageLog(run, session.log, files.path)
        self.error: Exception | None = None  # what this rank's data loader raised
        self.problem: str | None = None  # the last bad step, in a sentence
        self.losses: deque[float] = deque(maxlen=10)  # losses of the last good steps
        self.baselines: dict[str, float] = {}
        self.evaluation: Any = None  # called with the number of steps done
        # steps between two evaluations; 0, as always in pretraining: evaluate at each save
        self.evaluate_every = 0
        self.profile: RunProfile | None = None  # on rank 0, with --profile
        self.limits = LimitWarning(run, session)
        self.meter = Meter(checkpoints.begin, run.global_batch)  # its clock starts here

    def watch(self, model: nn.Module) -> None:
        """Compute the baselines; evaluate, and profile the steps, if asked for. Collective."""
        config = self.run.config
        with self.meter.paused():
            self.baselines = average_baselines(self.run, self.batch)
        self.evaluation = open_evaluation(self.run, self.session, model)
        if config.profile and self.session.ranks.rank == 0:
            if self.checkpoints.begin + WARM < self.run.steps:
                self.profile = RunProfile(self.run, self.session, self.meter, config.profile)
            else:
                self.session.log.warn("--profile: too few steps are left")

    def next_batch(self, step: int) -> Batch:
        """Return the batch of a step; once the loader has failed, the last batch again.

        All ranks learn of the failure together, when the step is checked: none waits for this one.
        """
        self.session.heartbeat("reading data", step)
        start = time.perf_counter()
        try:
            with record_function("wait for data"):  # the name in a profiler's trace
                if not self.error:
                    self.batch = next(self.batches)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the GPU's, not the loader's
            raise
        except Exception as error:
            self.error = error
        self.meter.waited += time.perf_counter() - start
        if not self.error:
            for index, reason in self.batch.bad:
                name = self.bad_images.name_of(index)
                self.bad_images.unreported.append((name, reason, step + 1))
        return self.batch

    def skip_batches(self, steps: int) -> None:
        """Throw away the batches of so many steps, then start the clock anew."""
        for _ in range(steps):
            self.next_batch(self.guard.done)
        self.meter = Meter(self.checkpoints.begin, self.run.global_batch)

    def requests(self) -> StepRequests:
        """Return what this rank asks of the others in a step."""
        return StepRequests(
            stop=bool(self.session.signals),
            save=self.checkpoints.due_by_clock(),
            no_batch=self.error is not None,
            bad_images=bool(self.bad_images.unreported),
        )

    def finished_steps(self, wait: bool) -> Iterator[StepResult]:
        """Yield the result of each step that does not end the run. Collective.

        A bad step is reported first. With `wait` it goes up to the last step, otherwise as far as
        results are there.
        """
        for result in self.guard.read_results(wait):
            if result.consecutive and not result.no_batch:
                self.problem = self.log_skip(result)
            if self.guard.end_reason and result.step == self.guard.done:
                return
            if not result.consecutive:
                self.losses.append(result.loss)
            yield result
        if self.bad_images.problem and not wait:  # the run ends, and saves all steps
            yield from self.finished_steps(wait=True)

    def log_skip(self, result: StepResult) -> str:
        """Log a bad step, which was not applied; return a message. Collective."""
        nonfinite = gather_to_rank0(result.local_loss_nonfinite) or []  # rank 0 writes the log
        ranks = [rank for rank, bad in enumerate(nonfinite) if bad]
        what = "loss" if result.bad_loss else "gradient norm"
        step = result.step + 1
        text = f"the {what} is not finite at step {step}"
        if ranks:  # for a loss: all ranks have the same gradient norm
            text += f" on rank {', '.join(map(str, ranks))}"
        self.session.log.write(
            "skip", step=step, what=what, ranks=ranks, consecutive_bad=result.consecutive
        )
        self.session.log.warn(f"{text}: optimizer step skipped")
        rate = "--blr" if self.run.config.lr is None else "--lr"
        return f"{text}: lower {rate} or add --clip 1, with --allow-changes"

    def log_step(self, result: StepResult, lr: float) -> None:
        """Log a step if it is due, and more often the bad images of all ranks. Collective."""
        done = result.step + 1
        due = done == self.run.steps or done % self.run.config.log_every == 0
        if result.bad_images and (due or done % BAD_IMAGES_EVERY == 0):
            with self.meter.paused():
                self.bad_images.sync()
        if due:
            self.session.log.step(result, lr, self.meter)
            self.limits.check(done, self.meter, self.guard)

    def finish(self, reason: str, problem: str | None) -> None:
        """Save, and log how the loop has ended; AgreedError if it failed. Collective."""
        guard = self.guard
        self.session.heartbeat("saving")
        self.checkpoints.finish()
        if reason == "nan":  # from before the bad steps, which the same command would meet again
            self.checkpoints.save_last(guard.done + 1 - guard.consecutive)
        if reason == "loader_error":
            problem = self.loader_error()
            self.checkpoints.save_last(guard.done)
        self.bad_images.sync()  # what was found since the last log line
        self.report_end(reason, problem)
        if self.run.config.run_mode == "real":
            # after a NaN or too many bad images the user must change something first
            finished = reason in ("done", "nan", "bad_images")
            self.session.log.say(self.checkpoints.where(finished))
            if reason == "done":
                mark_done(self.run.config.out, True)
        if problem:
            raise AgreedError(problem)

    def loader_error(self) -> str:
        """Return the error of the first rank whose loader has failed, on all. Collective."""
        if self.error and not isinstance(self.error, (OSError, RuntimeError)):  # a bug
            traceback.print_exception(self.error)
        text = None
        if self.error:
            text = cause_of(self.error)
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        rank, text = next((i, found) for i, found in enumerate(texts) if found is not None)
        where = f"reading data in step {self.guard.done + 1}"
        return f"rank {rank}: the data loader failed ({where}): {text}"

    def report_end(self, reason: str, problem: str | None) -> None:
        """Write the record `end`, and a summary to the terminal."""
        log = self.session.log
        done = self.guard.done
        end: dict[str, Any] = {
            "reason": reason,
            "problem": problem,
            "steps": done,
            "skipped": self.guard.skipped,
            "bad_images": len(self.bad_images.known),
        }
        reads_only = self.run.config.run_mode == "io"
        end |= self.meter.summary(reads_only)
        end |= devices.device_memory(self.session.device)
        if self.losses and not reads_only:
            end["loss"] = sum(self.losses) / len(self.losses)
            end |= self.baselines
            text = f"mean loss of the last {len(self.losses)} steps {end['loss']:.4f}"
            if self.baselines:
                zero = self.baselines["loss_of_zero"]
                colour = self.baselines["loss_of_mean_colour"]
                text += f"; predicting zero gives {zero:.4f}"
                text += f", the mean colour of the visible patches {colour:.4f}"
            log.say(text)
        # without --machine a CPU is planned as if it were a GPU
        plan_is_of_device = self.run.config.machine or self.session.device.type == "cuda"
        if self.session.planned and end["images_per_second"] and plan_is_of_device:
            seconds = self.run.global_batch / end["images_per_second"]
            text, values = compare_with_plan(
                self.session.planned, seconds, end["peak_allocated_gib"]
            )
            log.say(text)
            end |= values
        log.write("end", **end)
        rate = ""
        if end["images_per_second"]:  # None if no step was logged
            kind = "mean" if reads_only else "median"
            rate = f" {kind} {end['images_per_second']:.1f} img/s,"
        log.say(
            f"{reason}: {done - self.checkpoints.begin} steps in {end['seconds']:.1f} s,{rate} "
            f"{end['data_wait_fraction']:.1%} of the time waiting for data; "
            f"log in {self.run.config.out}/log.jsonl"
        )


def compare_with_plan(
    planned: dict[str, Any], step_seconds: float, peak_gib: float | None
) -> tuple[str, dict[str, float]]:
    """Set a run's median step and peak memory beside its plan -> a sentence, values for the log.

    `peak_gib` is None on a CPU, whose memory is not measured.
    """
    seconds = planned["seconds"]["step"]
    values = {"step_seconds": step_seconds, "planned_step_seconds": seconds}
    text = f"step {step_seconds:.3g} s, planned {seconds:.3g} s ({step_seconds / seconds - 1:+.0%})"
    if peak_gib is not None:
        gib = planned["memory_gib"]["peak"]
        values["planned_peak_gib"] = gib
        text += f"; peak {peak_gib:.2f} GiB, planned {gib:.2f} GiB ({peak_gib / gib - 1:+.0%})"
    return f"measured beside the plan for {planned['machine']}: {text}", values
