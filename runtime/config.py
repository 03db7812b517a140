"""The one table of flags, `Config`, and its parser; what follows from the flags is in run.py.

To add a flag, add a field to `Config` and use it: parser, --help, resume check, plan, sweep and log
read the table. What a flag means is the business of the file that uses it.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, Literal, NoReturn

import torch

import shard
import vit
from runtime.process import usage_error

MOST_SECONDS = 7 * 24 * 3600  # of any limit that waits

MOST_STEPS = 10**8 - 1  # a checkpoint's name has eight digits


class Parser(argparse.ArgumentParser):
    """Print an error as one sentence; exit status 2. Flags are written out, not abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | kwargs))

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low` to `high`."""

    def convert(text: str) -> int:
        # int() itself refuses thousands of digits, and takes those of any alphabet
        if re.fullmatch(r"-?[0-9]{1,20}", text) and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number from {low} to {high}")

    return convert


def number(low: float, high: float) -> Callable[[str], float]:
    """Make an argparse type: a number from `low` to `high`."""

    def convert(text: str) -> float:
        plain = re.fullmatch(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", text)
        if plain and low <= float(text) <= high:
            return float(text)
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number from {low:g} to {high:g}")

    return convert


def filled(text: str) -> str:
    """Be an argparse type: any text but none, which is what an unset variable of a shell gives."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r:.40} is empty: is a shell variable unset?")
    return text


# What may follow the name of a row. Not `channels`: --channels is a flag, also of the images.
FIELDS: Mapping[str, int] = {  # the largest value of each
    field.name: 1 if field.type is bool else 10**6
    for field in fields(vit.ViTConfig)
    if field.name != "channels"
}


def model_config(text: str) -> vit.ViTConfig:
    """Return the shape of the model `base`, or `base:depth=6,mlp_width=1536`.

    ValueError, one sentence, for a name or a field that there is not, a value out of its range, and
    a width that is not a multiple of its heads.
    """
    name, colon, rest = text.partition(":")
    if name not in vit.MODELS:
        example = "or one of these with other fields, as base:depth=6,mlp_width=1536"
        raise ValueError(f"there is no model {name!r:.40}: use {', '.join(vit.MODELS)}, {example}")
    changes: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        field, _, value = part.partition("=")
        if field not in FIELDS or field in changes:
            known = ", ".join(FIELDS)
            raise ValueError(f"{part!r:.40} in {text!r:.80} is not one FIELD=VALUE of {known}")
        try:
            least = 0 if field == "gated_mlp" else 1
            changes[field] = whole(least, FIELDS[field])(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{field} of {text!r:.80}: {error}") from None
    try:
        return replace(vit.MODELS[name], **changes)
    except ValueError as error:
        raise ValueError(f"--model {text}: {error}") from None


def model_size(text: str) -> str:
    """Be an argparse type: the name of a model, as `model_config` reads it."""
    try:
        model_config(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


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


def unit_wrapping(text: str) -> str:
    """Check the text of --wrap, for argparse."""
    try:
        shard.unit_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
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
    wrap: str | None = flag(
        None,
        unit_wrapping,
        "FSDP modes: what is gathered and freed as a whole: block; auto: small neighbouring blocks "
        "together; root: the whole model; size:N: modules with N or more parameters, by PyTorch's "
        "size_based_auto_wrap_policy (default block)",
        unit="UNITS",
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


STARTUP_TIMEOUT_FACTOR = 4  # what is done for the first time may take so many times --timeout

MAX_FAKE_RANKS = 2**17  # the process group of a dry run lists them all


class TrainingParser(Parser):
    """Print an error as one sentence, by rank 0 alone; exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(usage_error(message, program=self.prog))


def training_parser(program: str = "train_fsdp.py") -> TrainingParser:
    """Make the parser from the table. * marks what changes the result."""
    parser = TrainingParser(
        program,
        description="Pretrain a ViT-MAE. * marks flags that decide the result of the training: a "
        "resumed run must not change them without --allow-changes.",
    )
    add_flags(parser, Config)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, table: type[Config], left_out: Collection[str] = ()
) -> None:
    """Give a parser the flags of a table, but for those left out."""
    add = parser.add_argument
    for row in fields(table):
        mark = row.metadata
        if mark["group"]:
            add = parser.add_argument_group(mark["group"]).add_argument
        if row.name in left_out:
            continue
        help = "* " * mark["result"] + mark["help"]
        if row.default is not None and not isinstance(row.default, bool):
            help += f" (default {row.default})"
        options: dict[str, Any] = {"default": row.default, "help": help.replace("%", "%%")}
        kind = mark["kind"]
        if kind is bool and row.default is False:
            options["action"] = "store_true"
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif callable(kind):
            options |= {"type": kind, "metavar": mark["unit"]}
        else:
            options["choices"] = kind
        spellings = ["--" + row.name.replace("_", "-")]
        if row.name == "run":  # torchrun takes a bare --run for its own --run-path
            spellings, options["dest"] = ["--run-mode", "--run"], "run"
        add(*spellings, **options, **mark["argparse"])


def launched(environ: Mapping[str, str]) -> bool:
    """Tell whether torchrun, or srun with more than one task, started this process."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return "RANK" in environ or (in_step and tasks != "1")


def default_mode(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Choose ddp for a single process, which it leaves alone; hybrid for several, or for FSDP."""
    single = environ.get("WORLD_SIZE", "1") == "1" and ("RANK" in environ or not launched(environ))
    if args.world_size:
        single = args.world_size == 1
    fsdp = [args.group, args.fsdp, args.wrap, args.prefetch, args.forward_prefetch]
    fsdp += [args.cpu_offload, args.tp > 1, args.limit_all_gathers is not None]
    return "ddp" if single and not any(fsdp) else "hybrid"


def parse(argv: Sequence[str] | None) -> Config:
    """Read the flags of a training run; one sentence and exit status 2 where they clash."""
    parser = training_parser()
    config = make_config(parser, parser.parse_args(argv))
    if config.dry_run and not config.world_size:
        parser.error("--dry-run requires --world-size")
    if config.dry_run and not find_spec("planner"):
        parser.error("--dry-run needs the folder planner/: copy it too")
    if (config.eval_data or config.init_from) and not find_spec("downstream"):
        parser.error("--eval-data and --init-from need the folder downstream/: copy it too")
    if config.tensorboard and not find_spec("tensorboard"):
        parser.error("--tensorboard needs the package tensorboard: pip install tensorboard")
    if config.world_size and not config.dry_run:
        parser.error(
            "--world-size is for --dry-run: a real run has the ranks that its launcher starts"
        )
    if config.dry_run and launched(os.environ):
        parser.error(
            "--dry-run simulates its ranks in one process: run it without torchrun or srun"
        )
    if config.dry_run and (config.world_size or 0) > MAX_FAKE_RANKS:
        parser.error(f"--dry-run steps at most {MAX_FAKE_RANKS} ranks: plan.py has the same flags")
    return config


def make_config(
    parser: TrainingParser, args: argparse.Namespace, table: type[Config] = Config
) -> Config:
    """Make a Config of what the parser read, with the defaults that follow from the mode.

    Of a table that extends it, where one is given. For every program that takes the flags of
    training; the namespace may have more.
    """
    args.mode = args.mode or default_mode(args, os.environ)
    # a plan or a dry run may be made on a login node, where the job's GPUs are not visible
    gpu = args.device == "cuda" or (
        args.device == "auto" and (args.world_size or torch.cuda.is_available())
    )
    for sentence in clashes(args, "cuda" if gpu else "cpu"):
        parser.error(sentence)
    # What has no meaning in this mode stays None, so that the log does not claim it.
    for name in ("fsdp", "wrap", "prefetch", "limit_all_gathers"):
        value = getattr(shard.ShardingOptions, name)
        has_meaning = not any(shard.misuses(args.mode, {"fsdp": args.fsdp, name: value}))
        if getattr(args, name) is None and has_meaning:
            setattr(args, name, value)
    return table(**{row.name: getattr(args, row.name) for row in fields(table)})


def clashes(args: argparse.Namespace, device_type: str) -> Iterator[str]:
    """Yield a sentence for each flag, given explicitly, that has no meaning with the others."""
    given = {f.name: v for f in fields(Config) if (v := getattr(args, f.name)) != f.default}
    yield from shard.misuses(args.mode, given, lambda name: "--" + name.replace("_", "-"))
    use = "leave it out"
    if args.cpu_offload and device_type == "cpu":
        yield f"--cpu-offload moves parameters off a GPU, but this run is on the CPU: {use}"
    if args.batch and args.global_batch:
        yield "--batch and --global-batch: give one of them"
    if args.steps and args.epochs:
        yield "--steps and --epochs: give one of them"
    steps = args.steps or DEFAULT_STEPS
    if not args.epochs and (args.warmup_steps or 0) > steps:
        yield f"--warmup-steps {args.warmup_steps} is more than the {steps} --steps"
    if args.stage_dir and args.data == "synthetic":
        yield f"--stage-dir copies images, --data synthetic has none: {use}"
    if args.exact_decode and args.data == "synthetic":
        yield f"--exact-decode is for JPEGs, --data synthetic has none: {use}"
    if args.profile and args.run == "io":
        yield "--profile is for training steps, --run io makes none: leave one of them out"
