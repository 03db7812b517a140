"""The profile of a training run, for --profile: a step profile and its bytes on the wire."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from runtime import comm_counter, step_profile
from runtime.log import Log
from runtime.run import Run


class RunProfile:
    """Profile some steps of rank 0; `step(step)` surrounds each step of the loop."""

    def __init__(
        self, run: Run, log: Log, device: torch.device, grid: DeviceMesh, steps: range
    ) -> None:
        """`steps` are those that this process trains; too few of them are a warning."""
        self.run, self.log = run, log
        self.events: list[comm_counter.CommEvent] = []
        wanted = run.config.profile or 0
        self.profile = None
        if step_profile.WARM + wanted > len(steps):
            log.warn(
                f"--profile {wanted} is left out: it needs {step_profile.WARM + wanted} steps, "
                f"{len(steps)} remain"
            )
            return
        self.profile = step_profile.StepProfile(
            steps.start,
            wanted,
            device,
            os.path.join(run.config.out, "profile"),
            count=partial(self._counting, grid),
            report=self._report,
        )

    def step(self, step: int) -> AbstractContextManager:
        """Surround one step of the loop."""
        return self.profile.step(step) if self.profile else nullcontext()

    def payload_bytes(self) -> dict[str, int] | None:
        """Return the bytes of whole tensors that a step sends, by kind of collective."""
        return comm_counter.payload(self.events, self.run.ranks_per_group)

    def _counting(self, grid: DeviceMesh) -> AbstractContextManager:
        try:
            return comm_counter.counting(grid, self.events)
        except comm_counter.Unsupported:
            return nullcontext()

    def _report(self, found: dict[str, float] | str) -> None:
        assert self.profile is not None
        if isinstance(found, str):
            self.log.warn(f"no profile: {found}")
            return
        whole, first = sum(found.values()), self.profile.first
        self.log.write(
            "profile",
            first_step=first + 1,
            steps=self.profile.steps,
            ranks=[0],
            **found,
            shares={kind: seconds / whole for kind, seconds in found.items()},
        )
        self.log.say_all(step_profile.table(found, first))
