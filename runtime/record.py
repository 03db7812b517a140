"""What a run is: the start record of the log, its lines on the terminal, what zero would score."""

import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor

import data
import mesh
import shard
import vit
from runtime import devices
from runtime.agreement import AgreedError, StepGuard, mean_over_ranks
from runtime.bad_images import BadImageLog, describe_loaders
from runtime.device_batches import Batch
from runtime.devices import device_memory, peak_flops, planned
from runtime.log import Log, Meter
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

    `plan` is that of memory_fit.planned; `more` is added as it stands: begin, workers.
    """
    peak, peak_source = peak_flops(device)
    planned_gpu = bool(run.config.world_size) and run.config.device != "cpu"
    precision = devices.default_precision(planned_gpu or device.type == "cuda")
    return (
        run.record()
        | {
            "planned": {key: plan[key] for key in PLANNED}
            if plan
            else None,  # for Frontier's nodes
            "lr": run.lr,
            "epoch_steps": run.epoch_steps,
            "launcher": ranks.launcher,
            "local_world_size": ranks.local_world_size,
            "device": device.type,
            "mesh": dict(zip(mesh.DIMENSIONS, (*run.mesh_shape, 1), strict=False)),
            "params": parameter_count(run),
            "flops_per_image": run.flops_per_image(),
            "hardware_flops_per_image": run.flops_per_image(recomputed=True),
            "peak_flops_per_rank": peak,
            "peak_flops_source": peak_source,
            "sdpa": attention_kernels(run, device),
            "precision_default": ": ".join(precision),
            "cpu_step_seconds": devices.cpu_step_seconds(run, device),
            "host": platform.node(),
            "versions": versions(),
        }
        | more
    )


def report_start(run: Run, session: Session, begin: int, workers: int) -> None:
    """Log the start record before step `begin`; rank 0 plans the run, and says what it will do."""
    ranks, device, log = session.ranks, session.device, session.log
    plan = planned(run, device, log.warn) if ranks.rank == 0 else None
    start = start_record(run, ranks, device, plan, begin=begin, workers=workers)
    log.write("start", **start)
    log.say_all(describe(start))


def attention_kernels(run: Run, device: torch.device) -> dict[str, str]:
    """Name the attention kernel of the encoder and of the decoder, which sees all patches."""
    c, kept = run.model, vit.kept_patches(run.patches, run.config.mask_ratio)
    return {
        part: devices.attention_kernel(heads, width // heads, tokens + 1, run.dtype, device)
        for part, heads, width, tokens in (
            ("encoder", c.heads, c.width, kept),
            ("decoder", c.decoder_heads, c.decoder_width, run.patches),
        )
    }


def parameter_count(run: Run) -> int:
    """Count the parameters of the whole model."""
    with torch.device("meta"):
        model = vit.ViTMAE(run.model, run.config.img_size)
    return sum(p.numel() for p in model.parameters())


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
    s, row, world = start, shard.STRATEGIES[start["mode"]], start["world_size"]
    group, tp = s["mesh"]["shard"], s["mesh"]["tp"]
    gflop = s["flops_per_image"] / 1e9
    again = s["hardware_flops_per_image"]
    more = f", {again / 1e9:.1f} with recomputation" if again else ""
    yield f"{s['model']}: {s['params']:,} parameters, {gflop:.1f} GFLOP per image{more}"
    yield f"precision: {s['precision']} (default {s['precision_default']})"
    if s["sdpa"]:
        yield "attention: " + ", ".join(f"{part} {name}" for part, name in s["sdpa"].items())
        if "math" in s["sdpa"].values():
            yield "warning: no fused attention for these heads in this precision: it will be slow"
    shape = {name: size for name, size in s["mesh"].items() if name != "tp" or size > 1}
    dimensions, data_ranks = " x ".join(map(str, shape.values())), world // tp
    yield f"{world} ranks on {s['device']}, mesh {dimensions} ({' x '.join(shape)})"
    traffic = row.traffic if data_ranks > 1 else "no communication"
    yield f"{s['mode']}: shards {row.shards}; per step: {traffic}"
    node = s["local_world_size"]
    if mesh.straddles(group * tp, node):
        on = f"{group} on nodes of {node}" if tp == 1 else f"{group} x {tp} on nodes of {node}"
        yield f"note: shard groups of {on}: gathers go over the network"
    if tp > 1 and mesh.straddles(tp, node):
        yield (
            f"warning: --tp {tp} on nodes of {node} ranks: every block waits for the network four "
            f"times per step; use a --tp that divides {node}"
        )
    who = f"{data_ranks} groups of {tp} ranks" if tp > 1 else f"{world} ranks"
    yield f"batch: {s['batch']} images x {who} x {s['accum']} steps = {s['global_batch']}"
    yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['lr']:.3g}, reached in step " + str(
        s["warmup_steps"] or 1
    )
    if s["planned"] and s["planned"]["verdict"]:
        sign = "" if s["planned"]["verdict"] == "FITS" else "warning: "
        yield f"{sign}plan: {s['planned']['fit']}"
    if s["lr"] > LARGE_LR:
        yield f"warning: lr {s['lr']:.3g} is very large (MAE's recipe: 2.4e-3); lower --blr"
    if s["device"] == "cpu" and (s["cpu_step_seconds"] or 0) > 5:
        yield (
            f"note: a step takes about {s['cpu_step_seconds']:.0f} s on this CPU; a smaller run: "
            "python train_fsdp.py --model tiny --img-size 96 --out out/tiny"
        )
    left = s["images"] % s["global_batch"]
    yield f"data: {s['data']}, {s['images']} images, {s['epoch_steps']} steps per epoch"
    imagenet = s["channel_mean"] == data.IMAGENET.mean
    yield f"pixels: {s['channels']} channels of {s['image_dtype']}, mean and deviation of " + (
        "ImageNet" if imagenet else "the images"
    )
    if left:
        yield f"note: {left} images, different ones each time, are left out of each epoch"


def versions() -> dict[str, str | None]:
    """List the versions of Python and of the packages that decide numbers and speed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pillow": PIL.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def finish(
    run: Run,
    session: Session,
    ended: tuple[str, str | None],
    guard: StepGuard,
    meter: Meter,
    saves: Saves,
    bad_images: BadImageLog,
    loss_of_zero: Tensor | None,
    measured: Mapping[str, Any],
) -> str | None:
    """Save what is not saved, log how the run ended; return its error message, if any. Collective.

    `ended` is what the training loop returned, `measured` is added to the end record.
    """
    (reason, problem), config, log = ended, run.config, session.log
    if reason == "data":
        problem = session.first_loader_error(guard.loader_error, guard.done)
    session.heartbeat("saving")
    if reason == "nan":  # the same command meets the bad steps again
        saves.save_last(guard.done + 1 - guard.consecutive, 0)
    elif reason == "data":
        saves.save_last(guard.done, guard.consecutive)
    session.heartbeat("ending")
    bad_images.sync()  # what was found since the last log line
    end: dict[str, Any] = {"reason": reason, "problem": problem, "steps": guard.done}
    end |= {"skipped": guard.skipped, "bad_images": bad_images.count}
    end |= meter.summary() | device_memory(session.device)
    end |= measured
    if reason == "done" and meter.losses and loss_of_zero is not None and config.run != "io":
        last = torch.stack([torch.stack(list(meter.losses)).nanmean(), loss_of_zero])
        end["loss"], end["loss_of_zero"] = mean_over_ranks(last)
    if reason == "done" and saves.saver:
        try:
            mark_done(config.out, True)
        except AgreedError as error:
            end["problem"] = str(error)
    report_end(run, log, end, bad_images.report(end["seconds"], end["data_share"]))
    if saves.saver:
        log.say(saves.where(reason == "done"))
    if "TORCHELASTIC_RUN_ID" in os.environ and reason == "signal":
        log.say(TORCHRUN_NOTE)
    advice = {"nan": ": lower --blr, add --clip 1, or look at the images of that step"}
    return end["problem"] and end["problem"] + advice.get(reason, "")


def report_end(run: Run, log: Log, end: dict[str, Any], loaders: dict[str, Any]) -> None:
    """Write the records `io` and `end` to the log, and what they say in short to the terminal."""
    log.write("io", **loaders)
    if run.config.run == "io" and loaders:
        log.say_all(describe_loaders(loaders["ranks"]))
    if "loss_of_zero" in end:
        log.say(
            f"mean loss of the last {min(10, run.steps)} steps {end['loss']:.4f}; predicting zero "
            f"gives {end['loss_of_zero']:.4f}"
        )
    log.write("end", **end)
    log.say(
        f"{end['reason']}: {end['steps']} steps in {end['seconds']:.1f} s, median "
        f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time waiting "
        f"for data; log in {os.path.join(run.config.out, 'log.jsonl')}"
    )
