"""The one table of flags: `Config` is what was typed; what follows from it is in run.py.

To add a flag, add a field to `Config` and use it: parser, --help, resume check, plan, sweep and log
read the table. What a flag means is the business of the file that uses it.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

import shard
import vit
from runtime.model_size import model_size
from runtime.ranges import MOST_SECONDS, MOST_STEPS, filled, number, whole

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_STEPS = 100  # where neither --steps nor --epochs is given
DEFAULT_BATCH = 32


def save_interval(text: str) -> tuple[int | None, float | None]:
    """Parse --save-every into (steps, seconds); None for the one that was not given."""
    if text == "none":
        return None, None
    with suppress(argparse.ArgumentTypeError):
        if text.endswith("m"):
            return None, 60 * number(0.001, 10**5)(text[:-1])
        return whole(1, MOST_STEPS)(text), None
    raise argparse.ArgumentTypeError(
        f"{text!r:.40} is neither steps (500) nor minutes (30m) nor `none`"
    )


def save_every(text: str) -> str:
    """Check the text of --save-every, for argparse."""
    save_interval(text)
    return text


def flag(
    default: Any,
    kind: Callable[[str], Any] | Collection[str],
    help: str,
    *,
    unit: str | None = None,
    group: str | None = None,
    result: bool = False,
    plan: bool = False,
    sweep: str | None = None,
    **argparse_options: Any,
) -> Any:
    """Describe one flag as a dataclass field.

    `kind` converts the text, or lists the choices; `bool` is a switch. `group` is the heading that
    begins here. `result`: decides the result, so that a resumed run must not change it. `plan`:
    plan.py needs it. `sweep`: a sweep compares runs only where it is equal ("setting"), or draws
    one line for each value of it ("sharding").
    """
    return field(
        default=default,
        metadata={
            "kind": kind,
            "help": help,
            "unit": unit,
            "group": group,
            "result": result,
            "plan": plan,
            "sweep": sweep,
            "argparse": argparse_options,
        },
    )


SHARDING: Mapping[str, Any] = {"plan": True, "sweep": "sharding"}
SETTING: Mapping[str, Any] = {"plan": True, "sweep": "setting"}
RESULT: Mapping[str, Any] = {"result": True}


@dataclass(frozen=True)
class Config:
    """Hold what was typed. None: not given; the mode, the ranks or the data decide."""

    model: str = flag(
        "base",
        model_size,
        f"size of the model: {', '.join(vit.MODELS)}; or one with other fields, as "
        "base:depth=6,mlp_width=1536",
        unit="SIZE",
        group="model",
        **RESULT,
        **SETTING,
    )
    img_size: int = flag(
        224, whole(1, 4096), "side of an image", unit="PIXELS", **RESULT, **SETTING
    )
    channels: int = flag(
        3,
        whole(1, 4096),
        "channels of an image (other than 3: .npy files)",
        unit="N",
        **RESULT,
        **SETTING,
    )
    mask_ratio: float = flag(0.75, number(0, 1), "fraction of patches masked", **RESULT, **SETTING)
    norm_pix_loss: bool = flag(
        True, bool, "normalise each target patch by its own mean and variance", **RESULT
    )
    init_from: str | None = flag(
        None,
        filled,
        "begin with the weights of a run, a checkpoint, or a file or folder of the official MAE, "
        "timm or transformers; not read by a run that resumes",
        unit="FILE",
        **RESULT,
    )

    mode: str | None = flag(
        None,
        shard.STRATEGIES,
        "strategy (default hybrid; ddp for a single process, which has nothing to shard)",
        group="sharding",
        **SHARDING,
    )
    group: int | None = flag(
        None,
        whole(1, 10**8),
        "hybrid modes: ranks that share one copy of the parameters (default: the ranks of a node)",
        unit="RANKS",
        **SHARDING,
    )
    tp: int = flag(
        1,
        whole(1, 10**6),
        "FSDP2: ranks that split the matrices of each block (tensor parallelism), neighbours on a "
        "node; they train on the same images",
        unit="RANKS",
        **SHARDING,
    )
    fsdp: Literal[1, 2] | None = flag(
        None,
        whole(1, 2),
        "engine: 2 for fully_shard, 1 for FullyShardedDataParallel (default 2)",
        unit="ENGINE",
        **SHARDING,
    )
    wrap: Literal["block", "root"] | None = flag(
        None,
        ("block", "root"),
        "FSDP modes: what is gathered and freed as a whole: each block, or with root the model "
        "(default block)",
        **SHARDING,
    )
    prefetch: Literal["none", "backward_pre", "backward_post"] | None = flag(
        None,
        ("none", "backward_pre", "backward_post"),
        "when backward all-gathers the next unit (default backward_pre; backward_post: --fsdp 1 "
        "only, and it prefetches the wrong unit between MAE's decoder and encoder)",
        **SHARDING,
    )
    forward_prefetch: bool = flag(False, bool, "all-gather the next unit in forward", **SHARDING)
    limit_all_gathers: bool | None = flag(
        None, bool, "--fsdp 1: limit the all-gathers in flight (default on)", **SHARDING
    )
    cpu_offload: bool = flag(
        False, bool, "keep parameters, gradients and optimizer states in host memory", **SETTING
    )
    bucket_cap_mb: int | None = flag(
        None, whole(1, 2**16), "ddp, zero1: bucket size (default 25)", unit="MIB", **SHARDING
    )

    device: str = flag(
        "auto",
        ("auto", "cpu", "cuda"),
        "device to train on; cuda includes ROCm",
        group="memory, speed",
        sweep="setting",
    )
    precision: str = flag("bf16", DTYPES, "dtype of the computation", **RESULT, **SETTING)
    reduce_dtype: str = flag(
        "fp32", DTYPES, "dtype in which gradients are reduced over ranks", **RESULT, **SETTING
    )
    ac: Literal["none", "selective", "full"] = flag(
        "none",
        ("none", "selective", "full"),
        "activation checkpointing: recompute norms and GELU, or whole blocks",
        **SETTING,
    )
    compile: bool = flag(False, bool, "torch.compile every block", sweep="setting")

    data: str = flag("synthetic", filled, "folder of images", unit="DIR", group="data")
    eval_data: str | None = flag(
        None,
        filled,
        "folder of held-out images: at each save and at the end log their loss, with fixed masks, "
        "and draw what the model fills in, in --out/eval",
        unit="DIR",
    )
    run: str = flag(
        "real",
        ("real", "syn", "io"),
        "real: train; syn: the same with one batch kept on the device, compute and communication "
        "only; io: loader and copy only, no model. The other flags may stay as they are",
    )
    workers: int | None = flag(
        None,
        whole(0, 1024),
        "loader processes per rank (default: its CPU cores less one, at most 6)",
        unit="N",
    )
    stage_dir: str | None = flag(
        None,
        filled,
        "node-local folder: images are copied there when first read, the rest in the background, "
        "so that a node reads each from the shared file system once",
        unit="DIR",
    )
    max_bad: float = flag(
        0.01, number(0, 1), "share of unreadable images that ends the run", unit="SHARE"
    )
    exact_decode: bool = flag(
        False,
        bool,
        "decode JPEGs at full size, not at the scale that the crop needs (slower)",
        **RESULT,
    )

    batch: int | None = flag(
        None,
        whole(1, 10**6),
        f"local batch, per rank and step (default {DEFAULT_BATCH})",
        unit="IMAGES",
        group="optimisation",
        **SETTING,
    )
    global_batch: int | None = flag(
        None,
        whole(1, 10**8),
        "images per optimizer step over all ranks; replaces --batch",
        unit="IMAGES",
        **RESULT,
    )
    accum: int = flag(1, whole(1, 10**4), "accumulation steps", unit="STEPS", **SETTING)
    blr: float = flag(1.5e-4, number(0, 1000), "lr = blr x global batch / 256", **RESULT)
    weight_decay: float = flag(
        0.05, number(0, 1000), "AdamW weight decay, not applied to biases and norms", **RESULT
    )
    warmup_steps: int | None = flag(
        None,
        whole(0, MOST_STEPS),
        "length of the linear warm-up (default: 5 % of the steps)",
        unit="STEPS",
        **RESULT,
    )
    steps: int | None = flag(
        None, whole(1, MOST_STEPS), f"optimizer steps (default {DEFAULT_STEPS})", **RESULT
    )
    epochs: int | None = flag(
        None, whole(1, MOST_STEPS), "passes over the data, instead of --steps"
    )
    clip: float | None = flag(
        None, number(1e-6, 1e6), "largest gradient norm (default: none)", unit="NORM", **RESULT
    )
    max_skips: int = flag(
        0,
        whole(0, 10**6),
        "consecutive bad steps (loss or norm not finite) that are skipped before the run ends",
        unit="STEPS",
    )
    seed: int = flag(
        0, whole(0, 2**63 - 1), "random seed for weights, image order, crops and masks", **RESULT
    )

    out: str = flag("out", filled, "log and checkpoints go here", unit="DIR", group="output")
    log_every: int = flag(10, whole(1, MOST_STEPS), "steps between two log lines", unit="STEPS")
    tensorboard: bool = flag(
        False, bool, "write the numbers of each log line to --out/tensorboard too, for TensorBoard"
    )
    save_every: str = flag(
        "30m",
        save_every,
        "steps (500) or minutes (30m) between two checkpoints; the last step is always saved; "
        "none: no checkpoint at all",
        unit="STEPS|MINUTESm",
    )
    async_save: bool = flag(
        False, bool, "write checkpoints in the background; needs host memory for a copy"
    )
    keep: int = flag(2, whole(1, 10**6), "newest checkpoints to keep", unit="N")
    resume: str = flag(
        "auto", filled, "auto: newest complete checkpoint in --out; none; or PATH", unit="WHAT"
    )
    allow_changes: bool = flag(False, bool, "resume even if flags marked * have changed")
    timeout: int = flag(
        300,
        whole(1, MOST_SECONDS),
        "end the run if a rank makes no progress for this long (four times as long for start-up, "
        "compiling and saves)",
        unit="SECONDS",
    )
    profile: int | None = flag(
        None,
        whole(1, 1000),
        "profile this many steps on rank 0 (3 if no number is given) from step 6 on: a trace in "
        "--out/profile, a table of where the time goes, bytes of the collectives, GPU memory",
        unit="STEPS",
        nargs="?",
        const=3,
    )

    dry_run: bool = flag(
        False,
        bool,
        "simulate rank 0 of --world-size in one CPU process, without a launcher: check the "
        "command, step once on fake tensors, print memory and traffic, train nothing",
        group="plan",
    )
    world_size: int | None = flag(
        None,
        whole(1, 10**8),
        "ranks to plan for, on nodes of 8; with this, --device auto means GPU",
        unit="RANKS",
    )


def names(mark: str, value: Any = None, table: type[Config] = Config) -> tuple[str, ...]:
    """List the flags with a mark in the table: names("result"), names("sweep", "sharding")."""
    rows = ((row.name, row.metadata[mark]) for row in fields(table))
    return tuple(name for name, found in rows if (found == value if value else found))
