"""README and docs/ say what is true: commands run, tables and messages are those of the code."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from rebuild import blocks, environment, execute, find_printed

import checkpoint
import convert
import plan
import prepare
import probe
import shard
import sweep
import vit
from downstream import finetune
from runtime import config, devices

ROOMS = ["runtime", "storage", "planner", "sweeps", "downstream"]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("docs/*.md")}
README = PAGES["README.md"] = (ROOT / "README.md").read_text()
FRONTIER, LAYOUT = PAGES["docs/frontier.md"], PAGES["docs/layout.md"]
LAUNCH = (ROOT / "launch_frontier.sh").read_text()


def tracked() -> list[str]:
    """List the files that git knows, new ones included; skip the test outside of a checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the head first."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not inside:
                found.append([])
            if not re.fullmatch(r"[|-]+", line):
                found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line.startswith("|")
    return found


def table(text: str, head: str) -> list[list[str]]:
    """The rows below the head whose first cell is `head`."""
    return next(rows[1:] for rows in tables(text) if rows[0][0] == head)


def commands(text: str) -> list[str]:
    """Each command of the bash blocks, and of the prose, on one line without its comment."""
    shell = "".join(content for language, content in blocks(text) if language == "bash")
    lines = shell.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [code for code in re.findall(r"`([^`]+)`", prose) if len(code.split()) > 1]
    return [" ".join(line.split(" #")[0].split()) for line in lines if line.strip()]


COMMANDS = [(page, command) for page, text in PAGES.items() for command in commands(text)]


def started(program: str) -> list[str]:
    """The arguments of a program, wherever a page starts it."""
    start = r"^" if program == "torchrun" else r"\b(?:python|sbatch|torchrun)\b.* "
    found = [re.search(rf"{start}{re.escape(program)} (.+)", command) for _, command in COMMANDS]
    return [match[1].split(" > ")[0] for match in found if match]


# --- README


def test_strategy_table_is_that_of_the_code():
    mesh = {"1": "world x 1", "group": "world/group x group", "world": "1 x world"}
    rows = [
        [f"`{name}`", s.shards, mesh[s.group], "frees" if s.reshard else "keeps", s.traffic]
        for name, s in shard.STRATEGIES.items()
    ]
    assert [row[:-1] for row in table(README, "mode")] == rows  # the last: when to use it


def test_size_table_is_that_of_the_code():
    published = {"base": 87, "huge": 635, "1b": 914, "3b": 3067, "5b": 5349, "15b": 14720}
    rows = []
    for name, c in vit.MODELS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in vit.ViTMAE(c).parameters())
        rows.append(
            [
                f"`{name}`",
                str(c.width),
                str(c.depth),
                f"{c.mlp_width}{' gated' if c.gated_mlp else ''}",
                str(c.heads),
                str(c.patch),
                str(published.get(name, "-")),
                f"{count:,}",
                f"{vit.flops_per_image(c) / 1e9:.1f}",
                f"{16 * count / 2**30:.1f}",
            ]
        )
    assert table(README, "name") == rows


def test_file_table_names_the_top_level_and_nothing_else():
    shown = [row[0].strip("`") for row in table(README, "file or folder")]
    assert shown[:5] == ["vit.py", "data.py", "mesh.py", "shard.py", "train_fsdp.py"]
    names = {Path(name).parts[0] for name in tracked()}
    folders = {f"{name}/" for name in names if (ROOT / name).is_dir() and name[0] != "."}
    assert {*shown} == folders | {name for name in names if name.endswith((".py", ".sh"))}


# --- your first hour: the commands as printed, in their order, in a fresh clone


def first_hour() -> list[tuple[str, list[tuple[str, str]]]]:
    """Each step's heading and code blocks."""
    section = README.split("\n## Your first hour\n")[1].split("\n## ")[0]
    parts = [part.split("\n", 1) for part in section.split("\n### ")[1:]]
    return [(heading, blocks(text)) for heading, text in parts]


def clone(folder: Path) -> dict[str, str]:
    """Copy the tracked files to a folder, with this Python as its .venv; return the environment."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    os.utime(folder / "requirements.txt", (0, 0))  # or make would install again
    return environment(folder) | {"OMP_NUM_THREADS": "1"}


def run_steps(steps: list[tuple[str, list[tuple[str, str]]]], folder: Path) -> None:
    env = clone(folder)
    for _, parts in steps:
        output = ""
        for language, content in parts:
            if language:
                output = execute(language, content, folder, env)
            else:
                find_printed(content, output)


@pytest.mark.full
@pytest.mark.slow
def test_first_hour(tmp_path):
    run_steps(first_hour(), tmp_path)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 5000
    assert "](figures/throughput" in (tmp_path / "sweep_quick" / "report.md").read_text()


# --- the commands of the other pages, with images that are here and models that a CPU can train

# Needs a cluster, the network, or images of 12 channels; tests/test_sweep.py runs the sweeps.
ELSEWHERE = re.compile(
    r"\b(sbatch|conda|pip|module|apptainer|tail|tensorboard|make|source)\b"
    r"|--rdzv|sweep\.py|--channels 12"
)
STAND_INS = {
    "Million-AID/train": "out/tiles",
    "DIR": "out/tiles",
    "TRAIN": "out/tiles",
    "TEST": "examples/tiles/heldout",
    "PACK": "out/pack",
    "OUT/step_00000100": "out/demo/step_00000002",
    "out/demo/step_00000100": "out/demo/step_00000002",
    "OUT": "out/demo",
    "RUN": "out/demo",
    "out/huge": "out/demo",
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
    if {*words} & {"linear", "finetune"} and "--epochs" not in words:
        words += ["--epochs", "1"]
    return " ".join(SMALL if train and word == "base" else word for word in words)


@pytest.mark.full
@pytest.mark.slow
def test_every_command_runs(tmp_path):
    run = partial(execute, "bash", folder=tmp_path, env=clone(tmp_path))
    run("mkdir out && cp -r examples/tiles/train out/tiles")
    ranks = "torchrun --standalone --nproc-per-node 2 train_fsdp.py --mode full_shard"
    run(f"{ranks} --model {SMALL} --data out/tiles --out out/demo")
    ran = 0
    for page in ("outputs", "downstream", "manual", "README"):
        text = PAGES.get(f"docs/{page}.md") or README.split("\n## Read it\n")[1]
        run("rm -rf out/step_* out/done")  # of a page before, in the default --out
        for shell in [content for language, content in blocks(text) if language == "bash"]:
            lines = shell.replace("\\\n", " ").splitlines()
            here = [small(s.split(" #")[0]) for s in lines if s and not ELSEWHERE.search(s)]
            run("\n".join(here))  # in one shell: one of them changes the folder
            ran += len(here)
    assert ran >= 24


# --- commands of all pages


def test_commands_for_training_are_valid():
    found = [*started("train_fsdp.py"), *started("launch_frontier.sh")]
    found = [a for a in found if a.startswith("--") and "..." not in a and a != "--help"]
    assert len(found) >= 8
    for argv in found:
        config.parse(argv.split())  # SystemExit if not


def test_torchrun_takes_all_flags_without_two_dashes():
    """Its parser also sees what comes after the script's name: --run alone means --run-path."""
    from torch.distributed.run import get_args_parser

    found = started("torchrun")
    assert len(found) >= 3
    for argv in [*found, "train_fsdp.py --run-mode io"]:
        assert " -- " not in argv
        args = get_args_parser().parse_args(argv.split())
        assert args.training_script.endswith(".py") or args.module
    every = [option for row in config.training_parser()._actions for option in row.option_strings]
    for option in {*every} - {"--run", "-h", "--help"}:
        get_args_parser().parse_args(["train_fsdp.py", option])


def test_commands_of_the_other_programs_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where DIR, OUT and the like do not exist
    for argv in started("plan.py"):
        plan.plan_parser().parse_args(argv.split())
    for argv in started("sweep.py"):
        words = argv.split(" -- ")[0].replace('"-A PROJECT"', "-APROJECT")
        sweep.build_parser().parse_args(words.replace("--sbatch ", "--sbatch=").split())
    for program, name in ((checkpoint, "checkpoint.py"), (prepare, "prepare.py")):
        assert started(name)
        for argv in started(name):
            try:  # there is no such folder
                assert program.main(argv.split()) == 1
            except SystemExit as refused:
                assert "no folder" in str(refused) or refused.code == 2
    for argv in started("probe.py"):
        probe.read_subcommand(argv.split())
    for argv in started("convert.py"):
        convert.read_arguments(argv.split())
    makefile = (ROOT / "Makefile").read_text()
    for page, command in COMMANDS:
        if match := re.match(r"make ([a-z-]+)$", command):
            assert f"\n{match[1]}:" in makefile, (page, command)
        if match := re.search(r"(?:^|\s)python (-m )?([a-z_/.]+)", command):
            name = match[2].replace(".", "/") + ".py" if match[1] else match[2]
            assert name == "pip.py" or (ROOT / name).exists(), (page, command)


def test_flags_that_are_named_exist():
    known: set[str] = set()
    for parser in (config.training_parser(), plan.plan_parser(), sweep.build_parser()):
        known |= {option for row in parser._actions for option in row.option_strings}
    known |= {"--" + row.name.replace("_", "-") for row in fields(finetune.Tuning)}
    for path in (
        *ROOT.glob("[cp]*.py"),
        *ROOT.glob("downstream/*.py"),
        *ROOT.glob("benchmarks/*.py"),
    ):
        known |= {*re.findall(r'"(--[a-z-]+)"', path.read_text())}
    known |= {*re.findall(r"--[a-z-]+", LAUNCH)}
    # of torchrun, sbatch, pip, conda and apptainer
    known |= {"--standalone", "--nproc-per-node", "--nnodes", "--exclusive", "--gpus-per-node"}
    known |= {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr"}
    known |= {"--index-url", "--help", "--base", "--nv", "--rocm", "--bind"}
    for page, text in PAGES.items():
        for code in re.findall(r"`([^`]+)`", text.replace("```", "")):
            for option in re.findall(r"(?<![\w-])--[a-z-]+", code):
                assert option in known, (page, option)


def test_the_plan_of_the_manual_is_what_is_printed(capsys):
    section = PAGES["docs/manual.md"].split("\n## Plan a run\n")[1]
    (_, command), (_, shown) = blocks(section)[:2]
    assert plan.main(command.split()[2:]) == 0
    assert capsys.readouterr().out == shown


# --- names, links, messages, keys


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)  # of a link its text
        name = re.sub(r"[^\w -]", "", shown.strip().lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def test_links_lead_somewhere():
    reached = set()
    for page in [name for name in tracked() if name.endswith(".md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
            if not target.startswith("https://"):
                name, _, anchor = target.partition("#")
                path = (ROOT / page).parent / name if name else ROOT / page
                assert path.exists(), (page, target)
                assert not anchor or anchor in anchors(path.read_text()), (page, target)
                reached.add(path.resolve())
    linked = {*re.findall(r"\]\((docs/\w+\.md)\)", README)}
    assert linked == {page for page in PAGES if page.startswith("docs/")}
    assert {*ROOT.glob("docs/guide/*")} <= reached  # no picture that no page shows


def test_files_that_are_named_exist():
    known = {*tracked(), *(Path(name).name for name in tracked()), "sweep_quick/report.md"}
    for page, text in PAGES.items():
        for code in re.findall(r"`([^`\n]+)`", text):
            for name in re.findall(r"[\w/]+\.(?:py|md|sh)\b", code):
                assert name in known, (page, name)


def test_layout_lists_every_file():
    modules = [name for name in tracked() if name.endswith(".py") and "/__init__" not in name]
    for room in ("", *ROOMS):
        head = f"`{room}/`" if room else "top level"
        shown = [row[0].strip("`") for row in table(LAYOUT, head)]
        files = {Path(n).name for n in modules if Path(n).parent == Path(room)}
        assert len(shown) == len({*shown})
        assert {*shown} == files | ({"launch_frontier.sh"} if not room else set()), room


def test_log_keys_are_those_of_the_code():
    keys = {*devices.device_memory(torch.device("cpu"))}
    for node in ast.walk(ast.parse((ROOT / "runtime" / "log.py").read_text())):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) == "'step'":
            keys |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert {row[0].strip("`") for row in table(PAGES["docs/outputs.md"], "`step`")} == keys


# --- docs/frontier.md and launch_frontier.sh

# of the script, but not for the user to set
CALLERS = {"LD_LIBRARY_PATH", "CRAY_LD_LIBRARY_PATH", "NCCL_NET_PLUGIN", "TMPDIR"}
CALLERS |= {"LMOD_SYSTEM_NAME", "MODULESHOME", "CONDA_EXE", "CONDA_PREFIX"}
OWN = {"FIRST_JOB"}  # passed on from job to job of a chain


def test_variables_of_frontier_are_those_of_the_script():
    read = set(re.findall(r"\$\{([A-Z_]+):?[-=]", LAUNCH))
    read = {name for name in read if not name.startswith("SLURM_")} - CALLERS - OWN
    rows = {row[0].strip("`"): row[1].strip("`") for row in table(FRONTIER, "variable")}
    assert set(rows) == read
    for name, default in rows.items():
        constant = re.search(rf"\$\{{{name}:?[-=]([a-z0-9]+)\}}", LAUNCH)
        if constant:
            assert default == constant[1], name
