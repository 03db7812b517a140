"""README and docs/ say what is true: commands run, tables and messages are those of the code."""

import re
import shlex
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from pages import clone, tracked
from rebuild import blocks, execute, find_printed

import convert
import plan
import prepare
import probe
import shard
import sweep
import train_fsdp
import vit

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("docs/*.md")}
README = PAGES["README.md"] = (ROOT / "README.md").read_text()
MANUAL = PAGES["docs/manual.md"]
CLUSTER = PAGES["docs/cluster.md"]
LAUNCH = (ROOT / "launch_frontier.sh").read_text()
SOURCE = LAUNCH + "".join(path.read_text() for path in ROOT.glob("*.py"))
PARSERS = {
    "train_fsdp.py": train_fsdp.build_parser(),
    "plan.py": plan.build_parser(),
    "sweep.py": sweep.build_parser(),
    "prepare.py": prepare.build_parser(),
    "probe.py": probe.build_parser(),
    "convert.py": convert.build_parser(),
}


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the head first."""
    found = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    split = [[row.strip("|").split("|") for row in rows.splitlines()] for rows in found]
    return [[[cell.strip() for cell in row] for row in rows] for rows in split]


def table(text: str, head: str) -> list[list[str]]:
    """The rows below the head whose first cell is `head`."""
    return next(rows[2:] for rows in tables(text) if rows[0][0] == head)


def without_comment(line: str) -> str:
    """A command without the comment behind it, its words one space apart."""
    command, _, _ = line.partition(" #")
    return " ".join(command.split())


def commands(text: str) -> list[str]:
    """Each command of the bash blocks, and of the prose, on one line without its comment."""
    shell = "".join(content for language, content in blocks(text) if language == "bash")
    lines = shell.replace("\\\n", " ").splitlines()
    lines += [code for code in re.findall(r"`([^`]+)`", prose(text)) if len(code.split()) > 1]
    return [without_comment(line) for line in lines if line.strip()]


COMMANDS = [(page, command) for page, text in PAGES.items() for command in commands(text)]


def started(program: str) -> list[str]:
    """The arguments of a program, wherever a page starts it."""
    start = r"^" if program == "torchrun" else r"\b(?:python|sbatch|torchrun)\b.* "
    end = r"(?: (?:>|\|+) .*)?$"  # a pipe, or a file
    pattern = re.compile(rf"{start}{re.escape(program)} (.+?){end}")
    found = [pattern.search(command) for _, command in COMMANDS]
    return [match[1] for match in found if match]


# --- tables


def test_strategy_table_is_that_of_the_code():
    mesh = {"none": "world x 1", "group": "world/group x group", "world": "1 x world"}
    rows = [
        [f"`{name}`", s.shards, mesh[s.shard_over], s.traffic]
        for name, s in shard.STRATEGIES.items()
    ]
    assert [row[:-1] for row in table(README, "mode")] == rows  # the last: when to use it


def test_size_table_is_that_of_the_code():
    rows = []
    for name, c in vit.MODELS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in vit.ViTMAE(c).parameters())
        mlp = f"{c.mlp_width}{' gated' if c.gated_mlp else ''}"
        sizes = [f"`{name}`", c.width, c.depth, mlp, c.heads, c.patch, f"{count:,}"]
        rows.append([*map(str, sizes), f"{vit.flops_per_image(c) / 1e9:.1f}"])
    assert table(README, "name") == rows


def test_file_table_names_the_top_level():
    shown = [row[0].strip("`") for row in table(README, "file")]
    assert shown[:5] == ["vit.py", "data.py", "mesh.py", "shard.py", "train_fsdp.py"]
    names = {Path(name).parts[0] for name in tracked()}
    folders = {f"{name}/" for name in names if (ROOT / name).is_dir() and name[0] != "."}
    assert {*shown} == folders | {name for name in names if name.endswith((".py", ".sh"))}


def test_log_keys_are_those_of_a_run(run):
    out, _ = run
    log = (out / "log.jsonl").read_text()
    step = next(line for line in log.splitlines() if '"event": "step"' in line)
    keys = {*re.findall(r'"(\w+)":', step)} - {"event"}
    assert {row[0].strip("`") for row in table(MANUAL, "`step`")} == keys


def test_variables_are_those_of_the_launch_script():
    callers = {"LD_LIBRARY_PATH", "CRAY_LD_LIBRARY_PATH", "TMPDIR", "LMOD_SYSTEM_NAME"}
    callers |= {"MODULESHOME", "CONDA_EXE"}  # not for the user to set
    read = {name for name in re.findall(r"\$\{([A-Z_]+):?[-=]", LAUNCH) if name[:6] != "SLURM_"}
    assert {row[0].strip("`") for row in table(CLUSTER, "variable")} == read - callers


def test_messages_are_those_of_the_code():
    for message, _ in [*table(MANUAL, "message"), *table(CLUSTER, "message")]:
        if "PyTorch" not in message and message[0] == "`":
            assert message.strip("`") in SOURCE, message


# --- the commands of pages, in a fresh clone (test_guide.py: the first hour and the guide)


# Needs a cluster, the network, or images of other channels; tests/test_sweep.py runs the sweeps,
# test_plans_are_what_is_printed the plans of which one line is shown, test_verify.py verify.py.
ELSEWHERE = re.compile(
    r"\b(sbatch|conda|pip|module|apptainer|tail|tensorboard|make|source|timm)\b"
    r"|--rdzv|sweep\.py|verify\.py|--channels|--stack|plan\.py .* sed -n 2p"
)
STAND_INS = {
    "DIR": "out/tiles",
    "TRAIN": "out/tiles",
    "TEST": "examples/tiles/heldout",
    "PACK": "out/pack",
    "OUT": "out/demo",
    "RUN": "out/demo",
    "model.pth": "out/model.pth",
    "8": "2",  # ranks on a node, where torchrun starts them
    "128": "8",  # images of a rank
    "5": "1",  # epochs
}
SMALL = "tiny --img-size 96 --device cpu --precision fp32 --workers 0 --batch 4 --steps 2"


def small(command: str) -> str:
    """Write a command with the stand-ins; one that trains with a small model, for two steps."""
    if command.startswith("python plan.py") or "--dry-run" in command:
        fewer = " --batch 3" if "PACK" in command else ""  # of 192 images, on 64 ranks
        return command.replace("PACK", STAND_INS["PACK"]) + fewer
    words = [STAND_INS.get(word, word) for word in command.split()]
    train = "train_fsdp.py" in words
    if "linear" in words and "--epochs" not in words:
        words += ["--epochs", "1"]
    return " ".join(SMALL if train and word == "base" else word for word in words)


@pytest.mark.full
@pytest.mark.minutes
def test_every_command_runs(tmp_path):
    shell = partial(execute, "bash", folder=tmp_path, env=clone(tmp_path))
    shell("mkdir out && cp -r examples/tiles/train out/tiles")
    ranks = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 train_fsdp.py"
    shell(f"{ranks} --mode full_shard --model {SMALL} --data out/tiles --out out/demo")
    ran = 0
    _, after_first_hour = README.split("\n## The files\n")
    for text in (PAGES["docs/downstream.md"], PAGES["docs/images.md"], MANUAL, after_first_hour):
        shell("rm -rf out/step_* out/done out/pack")  # of a page before
        for script in [content for language, content in blocks(text) if language == "bash"]:
            lines = script.replace("\\\n", " ").splitlines()
            here = [small(without_comment(s)) for s in lines if s and not ELSEWHERE.search(s)]
            shell("\n".join(here))  # in one shell: one of them changes the folder
            ran += len(here)
    assert ran >= 15


# --- commands of all pages


def test_commands_are_valid(tmp_path, monkeypatch):
    from torch.distributed.run import get_args_parser

    monkeypatch.chdir(tmp_path)  # where DIR, OUT and the like do not exist
    found = {name: started(name) for name in PARSERS}
    found["train_fsdp.py"] += started("launch_frontier.sh")
    for name, commands_of in found.items():
        assert commands_of, name
        parser = PARSERS[name]
        for argv in commands_of:  # SystemExit if it is not valid
            dry = "--dry-run" in argv
            words = argv.replace("--dry-run ", "").replace('--sbatch "', '"--sbatch=')
            if name == "train_fsdp.py" and (not argv.startswith("--") or "..." in argv):
                continue  # a file that is named beside it
            if "--help" not in argv:
                (plan.build_parser() if dry else parser).parse_args(shlex.split(words))
    for argv in started("torchrun"):
        get_args_parser().parse_args(shlex.split(argv))
    makefile = (ROOT / "Makefile").read_text()
    for page, command in COMMANDS:
        target = re.match(r"make ([a-z-]+)$", command)
        assert not target or f"\n{target[1]}:" in makefile, (page, command)


@pytest.mark.parametrize("page", ["docs/manual.md", "docs/downstream.md"])
def test_plans_are_what_is_printed(page, capsys):
    found = [pair for pair in pairwise(blocks(PAGES[page])) if "python plan.py" in pair[0][1]]
    assert found or page != "docs/manual.md"
    for (_, script), (_, shown) in found:
        for line in script.splitlines():
            _, _, *argv = line.removesuffix(" | sed -n 2p").split()  # python plan.py
            plan.main(argv)
        assert find_printed(shown, capsys.readouterr().out) == shown.splitlines()


# --- names and links


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_lead_somewhere(page):
    known = {*tracked(), *(Path(name).name for name in tracked()), "train.py"}  # timm's
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path.read_text()), target
    for code in re.findall(r"`([^`\n]+)`", PAGES[page]):
        assert {*re.findall(r"[\w/]+\.(?:py|md|sh)\b", code)} <= known, code
