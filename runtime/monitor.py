"""The steps of a run and its end: batches, what the ranks agreed on, the log."""

import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from runtime import devices
from runtime.agreement import AgreedError, StepGuard, Verdict, gather_to_rank0, run_on_rank0
from runtime.baselines import baselines
from runtime.device_batches import Batch
from runtime.log import BadImageLog, Meter
from runtime.profiling import WARM, RunProfile
from runtime.resume import Saves, mark_done
from runtime.run import Run
from runtime.run_plan import beside_plan
from runtime.session import Session, cause_of


class Monitor:
    """Watch the steps of a run: the ranks' votes, the clock, unreadable images, the log."""

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

        All ranks learn of the failure together, by their vote: none waits for this one.
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
        """Return what this rank has to say in the vote of a step, as of `StepGuard.vote`."""
        return {
            "stop": bool(self.session.signals),
            "save": self.saves.due_by_clock(),
            "no_batch": self.error is not None,
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
            if not verdict.consecutive:
                self.losses.append(verdict.loss)
            yield verdict
        if self.bad_images.too_many and not wait:  # the run ends: save what is applied by now
            yield from self.settle(wait=True)

    def log_skip(self, verdict: Verdict) -> str:
        """Log a step that was not applied; return a message. Collective."""
        own_losses = gather_to_rank0(verdict.own_loss) or []
        ranks = [rank for rank, bad in enumerate(own_losses) if bad]
        what, step = "loss" if verdict.bad_loss else "gradient norm", verdict.step + 1
        text = f"the {what} is not finite at step {step}"
        if ranks:  # a norm is of all
            text += f" on rank {', '.join(map(str, ranks))}"
        found = {"what": what, "ranks": ranks, "consecutive_bad": verdict.consecutive}
        self.session.log.write("skip", step=step, **found)
        self.session.log.warn(f"{text}: optimizer step skipped")
        return f"{text}: lower --blr or add --clip 1, with --allow-changes"

    def log_step(self, verdict: Verdict, lr: float) -> None:
        """Log a step that has a line, and the bad images of all ranks since. Collective."""
        done = verdict.step + 1
        if done == self.run.steps or done % self.run.config.log_every == 0:
            with self.meter.paused():
                if verdict.bad_images:
                    self.bad_images.sync()
            self.session.log.step(verdict, lr, self.meter)

    def finish(self, reason: str, problem: str | None) -> None:
        """Save, and log how the loop has ended; AgreedError if it failed. Collective."""
        guard, saves, session = self.guard, self.saves, self.session
        session.heartbeat("saving")
        if reason == "nan":  # before the first of the bad steps, which the same command meets again
            saves.save_last(guard.done + 1 - guard.consecutive)
        if reason == "data":
            problem = self.loader_error()
            saves.save_last(guard.done)
        self.bad_images.sync()  # what was found since the last log line
        self.report_end(reason, problem)
        if self.run.config.run_mode == "real":
            # after a NaN or too many bad images something is to be changed first
            session.log.say(saves.where(reason in ("done", "nan", "bad")))
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
        # without --machine a CPU is planned as if it were a GPU
        plan_is_of_device = self.run.config.machine or self.session.device.type == "cuda"
        if self.session.planned and end["images_per_second"] and plan_is_of_device:
            seconds = self.run.global_batch / end["images_per_second"]
            text, values = beside_plan(self.session.planned, seconds, end["peak_allocated_gib"])
            log.say(text)
            end |= values
        log.write("end", **end)
        log.say(
            f"{reason}: {guard.done - self.saves.begin} steps in {end['seconds']:.1f} s, median "
            f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time "
            f"waiting for data; log in {self.run.config.out}/log.jsonl"
        )
