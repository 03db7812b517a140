"""The points of a sweep: the published studies, or a table of one's own; what plan.py says of them.

A point is a row of a table: `nodes`, `ranks` (of a node), `study`, and any flag of train_fsdp.py.
"""

import contextlib
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.attempts import core_count, last_error, read_text

HERE = Path(__file__).resolve().parent.parent
Point = dict[str, str]

OWN = ("id", "study", "nodes", "ranks")  # columns that are no flags
PLANNED = (
    "model",
    "img_size",
    "mask_ratio",
    "mode",
    "group",
    "fsdp",
    "batch",
    "accum",
    "precision",
    "reduce_dtype",
    "ac",
    "prefetch",
    "forward_prefetch",
    "cpu_offload",
    "bucket_cap_mb",
)
OURS = ("out", "resume", "save_every", "async_save", "dry_run", "world_size")  # never the user's
LENGTH = {"steps": "60", "log_every": "5"}
PREFETCHES = ("none", "backward_pre", "backward_post")


def sizes(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    powers = [2**i for i in range(largest.bit_length()) if 2**i < largest]
    return [*powers, largest]


def options(models: Sequence[str], layouts: Sequence[tuple[int, int]]) -> Iterator[Point]:
    """Figure 1: sharding x backward prefetch x limit_all_gathers, which FSDP1 alone has."""
    for model in models:
        nodes, ranks = layouts[-1]
        world = nodes * ranks
        groups = [g for g in (2, 2 * ranks) if world % g == 0 and g < world]
        for mode, group in [("full_shard", ""), *(("hybrid", str(g)) for g in groups)]:
            for prefetch in PREFETCHES:
                for limit in ("false", "true"):
                    yield {
                        "study": "options",
                        "nodes": str(nodes),
                        "ranks": str(ranks),
                        "model": model,
                        "mode": mode,
                        "group": group,
                        "fsdp": "1",
                        "prefetch": prefetch,
                        "limit_all_gathers": limit,
                        "run": "syn",
                        **LENGTH,
                    }


def scaling(models: Sequence[str], layouts: Sequence[tuple[int, int]]) -> Iterator[Point]:
    """Figures 2 and 3: every sharding on more and more devices, local batch kept."""
    for model in models:
        for nodes, ranks in layouts:
            world = nodes * ranks
            groups = [g for g in sorted({2, 4, ranks, 2 * ranks}) if 1 < g < world > 1]
            modes = [(m, "") for m in ("ddp", "no_shard", "shard_grad_op", "full_shard")]
            modes += [("hybrid", str(g)) for g in groups if world % g == 0]
            for mode, group in modes if world > 1 else modes[:2]:  # the rest is the same on one
                yield {
                    "study": "scaling",
                    "nodes": str(nodes),
                    "ranks": str(ranks),
                    "model": model,
                    "mode": mode,
                    "group": group,
                    "run": "syn",
                    **LENGTH,
                }


def io(models: Sequence[str], layouts: Sequence[tuple[int, int]], data: str) -> Iterator[Point]:
    """Training, the same without input, input alone; one device alone tells what is computed."""
    for model in models:
        for nodes, ranks in layouts:
            modes = ("full_shard",) if nodes * ranks > 1 else ("ddp", "no_shard")
            compared = nodes * ranks > 1 or len(layouts) == 1
            for mode in modes:
                for run in ("real", "syn", "io") if compared and mode != "ddp" else ("syn",):
                    yield {
                        "study": "io",
                        "nodes": str(nodes),
                        "ranks": str(ranks),
                        "model": model,
                        "mode": mode,
                        "run": run,
                        "data": data if run != "syn" else "",
                        **LENGTH,
                    }


def quick(gpus: int, ranks: int, chosen: str | None, data: str) -> Iterator[Point]:
    """A little of each of the others: on 1, 2 and 4 CPU ranks, or on the GPUs of this node."""
    layouts = [(1, r) for r in sizes(ranks)]
    small = (
        {}
        if gpus
        else {
            "img_size": "64",
            "batch": "8",
            "precision": "fp32",
            "device": "cpu",
            "steps": "32",
            "log_every": "2",
        }
    )
    models = (chosen or ("base" if gpus else "tiny")).split(",")
    kept = ("ddp", "no_shard", "full_shard", "hybrid")
    for point in scaling(models, layouts):
        if point["mode"] in kept:
            yield point | small
    middle = [(1, min(2, ranks))]
    yield from (point | small for point in options(models, middle))
    yield from (point | small for point in io(models, [(1, 1), *middle][-min(2, ranks) :], data))


def table(path: Path) -> list[Point]:
    """A CSV of one's own; ValueError, a sentence, for what makes no point."""
    try:
        lines = csv.DictReader(read_text(path).splitlines(keepends=True))
        rows = [{k.strip(): (v or "").strip() for k, v in row.items() if k} for row in lines]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except csv.Error as error:
        raise ValueError(f"{path} is no table: {error}") from None
    for line, row in enumerate(rows, 2):
        row.setdefault("nodes", "1")
        row.setdefault("study", path.stem)
        for name in ("nodes", "ranks"):
            if not re.fullmatch("[1-9][0-9]{0,5}", row.get(name, "")):
                raise ValueError(
                    f"{path}, line {line}: {name} is {row.get(name, '')!r}, but must be a whole "
                    "number above zero: `ranks` are those of a node"
                )
    if not rows:
        raise ValueError(
            f"{path} has no points: a head line with nodes, ranks and flags, then rows"
        )
    return rows


def flags_of(words: Sequence[str]) -> Point:
    """`--img-size 96 --compile --no-norm-pix-loss` as the cells of a table."""
    found: Point = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            name = name.replace("-", "_")
            off = name.startswith("no_") and not given
            name = name[3:] if off else name
            found[name] = value if given else "false" if off else "true"
        elif name and found[name] == "true":
            found[name] = word
        else:
            raise ValueError(f"{word} after -- is no flag of train_fsdp.py: they begin with --")
    return found


def argv_of(point: Mapping[str, str]) -> list[str]:
    """The flags of a point as train_fsdp.py takes them."""
    words = []
    for name, value in point.items():
        flag = name.replace("_", "-")
        if name in OWN or not value:
            continue
        if value in ("true", "false"):
            words += [f"--{flag}" if value == "true" else f"--no-{flag}"]
        else:
            words += [f"--{flag}", value]
    return words


def finished(points: Sequence[Point], extra: Mapping[str, str]) -> list[Point]:
    """Each point once, with its id: names to read, and a sum of all its flags."""
    found: dict[str, Point] = {}
    for point in points:
        cells = {k: v for k, v in {**point, **extra}.items() if v and k not in ("id", "study")}
        wrong = [name for name in OURS if name in cells]
        if wrong:
            raise ValueError(f"--{wrong[0].replace('_', '-')} is set by the sweep: leave it out")
        text = json.dumps(sorted(cells.items()))
        name = f"{cells.get('model', 'base')}-{cells.get('mode', 'hybrid')}{cells.get('group', '')}"
        name += f"-{cells['nodes']}x{cells['ranks']}-{cells.get('run', 'real')}"
        name = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
        studies = {*found.get(name, {}).get("study", "").split(), *point["study"].split()}
        found[name] = {"id": name, "study": " ".join(sorted(studies)), **cells}
    return list(found.values())


def choose(
    what: str,
    models: str | None,
    nodes: Sequence[int] | None,
    ranks: int | None,
    data: str,
    slurm: bool,
    count_gpus: Callable[[], int],
) -> list[Point]:
    """The points of a study or of a table; ValueError, a sentence, where there are none."""
    given = {"--models": models, "--nodes": nodes, "--ranks": ranks}
    if what.endswith(".csv"):
        for flag, value in given.items():
            if value:
                raise ValueError(f"{flag} is for the studies: {what} has columns for it")
        return table(Path(what))
    if what not in ("quick", "options", "scaling", "io"):
        raise ValueError(
            f"there is no study {what}: use quick, options, scaling, io, a CSV file, or status, "
            "figures, report with a folder"
        )
    if nodes and not slurm:
        raise ValueError("--nodes needs Slurm, this is one node: add --sbatch FLAGS")
    if models is not None and not all(models.split(",")):
        raise ValueError(f"--models {models!r} is not a list of names like base,3b")
    if what in ("quick", "io"):
        data = images_in(data)
    gpus = 0 if slurm else count_gpus()
    per_node = ranks or (8 if slurm else gpus or min(4, max(2, core_count())))
    layouts = [(n, per_node) for n in nodes or (1, 2, 4, 8)]
    layouts = [(1, 1), *layouts] if slurm else [(1, r) for r in sizes(per_node)]
    layouts = list(dict.fromkeys(layouts))
    if what == "quick":
        return list(quick(gpus, ranks or gpus or 4, models, data))
    if what == "options":
        return list(options((models or "5b").split(","), layouts))
    if what == "scaling":
        return list(scaling((models or "base,1b,3b,5b,15b").split(","), layouts))
    ends = layouts if slurm else list(dict.fromkeys((layouts[0], layouts[-1])))
    return list(io((models or "base").split(","), ends, data))


def images_in(data: str) -> str:
    """--data as a point takes it, which runs in another folder; ValueError where nothing is."""
    if data == "synthetic":
        return data
    if not any(files for _, _, files in os.walk(data)):
        raise ValueError(f"--data {data!r} is no folder with images: name one, or synthetic")
    return os.path.abspath(data)


# ---------------------------------------------------------------------------------------------
# Asking first

# Most of the time of `plan.py --json` is the import of torch: one process answers for all points.
ANSWERS = """
import contextlib, io, json, sys
import torch
import plan
from runtime import flags
def said(main, argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(argv)
        except SystemExit:
            return None, err.getvalue().strip().splitlines()[-1]
    return out.getvalue(), ""
for line in sys.stdin:
    asked = json.loads(line)
    if asked == "device":
        n = torch.cuda.device_count()
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if n else 0
        print(json.dumps([n, gib]), flush=True)
        continue
    wrong = said(flags.parse_args, asked[0])[1]
    text, why = (None, wrong) if wrong else said(plan.main, asked[1])
    print(json.dumps([text and json.loads(text), why]), flush=True)
"""


class Planner:
    """plan.py's answers, and which device is here; the process starts when first asked."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, question: Any) -> Any:
        """RuntimeError where it does not answer."""
        if self.process is None:
            rank = ("SLURM_", "RANK")  # of a surrounding job, of which we are no rank
            own = {k: v for k, v in os.environ.items() if not k.startswith(rank)}
            self.process = subprocess.Popen(
                [sys.executable, "-c", ANSWERS],
                cwd=HERE,
                env=own,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        process = self.process
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"planning failed: {last_error(process.communicate()[1])}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self.process:
            self.process.communicate()

    def plan(
        self, point: Mapping[str, str], machine: str | None, memory_gib: float | None
    ) -> dict[str, Any]:
        """What results.csv keeps of a point's plan; ValueError where its flags are refused."""
        world = str(int(point["nodes"]) * int(point["ranks"]))
        train = [*argv_of(point), "--dry-run", "--world-size", world]
        chosen = argv_of({k: v for k, v in point.items() if k in PLANNED})
        chosen += ["--world-size", world, "--json"]
        chosen += ["--machine", machine] if machine else []
        chosen += ["--memory-gib", f"{memory_gib:.3f}"] if memory_gib else []
        plan, why = self.ask((train, chosen))
        if plan is None:
            raise ValueError(f"point {point['id']}: {why.partition('error: ')[2] or why}")
        peak, margin, limit = plan["memory_gib"]["peak"], plan["margin_gib"], plan["available_gib"]
        facts = {"verdict": plan["verdict"], "planned_gib": peak, "memory_gib": limit}
        facts["max_local_batch"] = plan["max_local_batch"]
        facts["why_not"] = f"plan.py: {peak:.1f} GiB + {margin:.1f} margin, of {limit:.1f}"
        if machine:  # else its speed is another machine's
            facts["planned_images_per_second"] = plan["images_per_second_upper_bound"]
        return facts


def host_gib() -> float:
    """Memory of this host, or of the container that we are in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total / 2**30
