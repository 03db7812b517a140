"""README and docs/ say what is true: commands run, tables and messages are those of the code."""

import ast
import re
import shlex
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from pages import clone, tracked
from rebuild import blocks, execute, find_printed

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

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("docs/*.md")}
README = PAGES["README.md"] = (ROOT / "README.md").read_text()
MANUAL = PAGES["docs/manual.md"]
CLUSTER = PAGES["docs/cluster.md"]
LAUNCH = (ROOT / "launch_frontier.sh").read_text()
ROOMS = ("runtime", "storage", "planner", "sweeps", "downstream", "benchmarks")
SCRIPTS = [*ROOT.glob("*.py")]
for room in ROOMS:
    SCRIPTS += ROOT.glob(f"{room}/*.py")
SOURCE = LAUNCH + "".join(path.read_text() for path in SCRIPTS)


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


def commands(text: str) -> list[str]:
    """Each command of the bash blocks, and of the prose, on one line without its comment."""
    shell = "".join(content for language, content in blocks(text) if language == "bash")
    lines = shell.replace("\\\n", " ").splitlines()
    lines += [code for code in re.findall(r"`([^`]+)`", prose(text)) if len(code.split()) > 1]
    return [without_comment(line) for line in lines if line.strip()]


def without_comment(line: str) -> str:
    """A command without the comment behind it, its words one space apart."""
    command, _, _ = line.partition(" #")
    return " ".join(command.split())


COMMANDS: list[tuple[str, str]] = []  # page, command
for page, text in PAGES.items():
    COMMANDS += [(page, command) for command in commands(text)]


def started(program: str) -> list[str]:
    """The arguments of a program, wherever a page starts it."""
    start = r"^" if program == "torchrun" else r"\b(?:python|sbatch|torchrun)\b.* "
    end = r"(?: (?:>|\|+) .*)?$"  # a pipe, or a file
    pattern = re.compile(rf"{start}{re.escape(program)} (.+?){end}")
    found = [pattern.search(command) for _, command in COMMANDS]
    return [match[1] for match in found if match]


# --- pages and tables


def test_pages_are_short_and_their_tables_whole():
    """By `wc -w`; these limits may only shrink."""
    words = {page: len(prose(text).split()) for page, text in PAGES.items()}
    assert words["README.md"] <= 1100 and sum(words.values()) <= 11300, words
    for page, text in PAGES.items():
        for rows in tables(text):
            assert len({len(row) for row in rows}) == 1, (page, rows[0])


def test_strategy_table_is_that_of_the_code():
    mesh = {"none": "world x 1", "group": "world/group x group", "world": "1 x world"}
    rows = [
        [f"`{name}`", s.shards, mesh[s.shard_over], s.traffic()]
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


def test_file_table_names_the_top_level_and_nothing_else():
    shown = [row[0].strip("`") for row in table(README, "file or folder")]
    assert shown[:5] == ["vit.py", "data.py", "mesh.py", "shard.py", "train_fsdp.py"]
    names = {Path(name).parts[0] for name in tracked()}
    folders = {f"{name}/" for name in names if (ROOT / name).is_dir() and name[0] != "."}
    assert {*shown} == folders | {name for name in names if name.endswith((".py", ".sh"))}


def test_log_keys_are_those_of_the_code():
    keys = {*devices.device_memory(torch.device("cpu"))}
    for node in ast.walk(ast.parse((ROOT / "runtime" / "log.py").read_text())):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) == "'step'":
            keys |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert {row[0].strip("`") for row in table(MANUAL, "`step`")} == keys


def test_variables_are_those_of_the_launch_script():
    callers = {"LD_LIBRARY_PATH", "CRAY_LD_LIBRARY_PATH", "TMPDIR", "LMOD_SYSTEM_NAME"}
    callers |= {"MODULESHOME", "CONDA_EXE"}  # not for the user to set
    read = {name for name in re.findall(r"\$\{([A-Z_]+):?[-=]", LAUNCH) if name[:6] != "SLURM_"}
    rows = {name.strip("`"): default for name, default, *_ in table(CLUSTER, "variable")}
    assert {*rows} == read - callers
    for name, shown in rows.items():
        default, _, _ = shown.partition(";")
        constant = re.search(rf"\$\{{{name}:?[-=]([a-z0-9]+)\}}", LAUNCH)
        if constant:
            assert default.strip("`") == constant[1], name


def test_messages_are_those_of_the_code():
    for message, _ in [*table(MANUAL, "message"), *table(CLUSTER, "message")]:
        if "PyTorch" not in message and message[0] == "`":
            assert message.strip("`") in SOURCE, message


# --- the commands of pages, in a fresh clone (test_guide.py: the first hour and the guide)


# Needs a cluster, the network, or images of other channels; tests/test_sweep.py runs the sweeps,
# test_plans_are_what_is_printed the plans of which one line is shown.
ELSEWHERE = re.compile(
    r"\b(sbatch|conda|pip|module|apptainer|tail|tensorboard|make|source)\b"
    r"|--rdzv|sweep\.py|--channels|--stack|plan\.py .* sed -n 2p"
)
STAND_INS = {
    "Million-AID/train": "out/tiles",
    "DIR": "out/tiles",
    "TRAIN": "out/tiles",
    "TEST": "examples/tiles/heldout",
    "PACK": "out/pack",
    "OUT": "out/demo",
    "RUN": "out/demo",
    "model.pth": "out/model.pth",
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
@pytest.mark.minutes
def test_every_command_runs(tmp_path):
    run = partial(execute, "bash", folder=tmp_path, env=clone(tmp_path))
    run("mkdir out && cp -r examples/tiles/train out/tiles")
    ranks = "torchrun --standalone --nproc-per-node 2 train_fsdp.py --mode full_shard"
    run(f"{ranks} --model {SMALL} --data out/tiles --out out/demo")
    ran = 0
    _, after_first_hour = README.split("\n## The code\n")
    for text in (PAGES["docs/downstream.md"], PAGES["docs/images.md"], MANUAL, after_first_hour):
        run("rm -rf out/step_* out/done out/pack")  # of a page before
        for shell in [content for language, content in blocks(text) if language == "bash"]:
            lines = shell.replace("\\\n", " ").splitlines()
            here = [small(without_comment(s)) for s in lines if s and not ELSEWHERE.search(s)]
            run("\n".join(here))  # in one shell: one of them changes the folder
            ran += len(here)
    assert ran >= 20


# --- commands of all pages


def test_commands_are_valid(tmp_path, monkeypatch, capsys):
    from torch.distributed.run import get_args_parser

    monkeypatch.chdir(tmp_path)  # where DIR, OUT and the like do not exist
    training = [*started("train_fsdp.py"), *started("launch_frontier.sh")]
    training = [a for a in training if a.startswith("--") and "..." not in a and a != "--help"]
    parsers = {
        config.parse: training,
        get_args_parser().parse_args: started("torchrun"),
        plan.plan_parser().parse_args: started("plan.py"),
        sweep.build_parser().parse_args: started("sweep.py"),
        prepare.read_command_line: started("prepare.py"),
        probe.read_subcommand: started("probe.py"),
        convert.read_arguments: started("convert.py"),
    }
    for parse, found in parsers.items():
        assert found
        for argv in found:  # SystemExit if it is not valid
            own, _, _ = argv.partition(" -- ")
            parse(shlex.split(own.replace('--sbatch "', '"--sbatch=')))
    for argv in started("checkpoint.py"):
        with pytest.raises(SystemExit):
            checkpoint.main(argv.split())
        assert "there is no folder" in capsys.readouterr().err
    makefile = (ROOT / "Makefile").read_text()
    for page, command in COMMANDS:
        target = re.match(r"make ([a-z-]+)$", command)
        if target:
            assert f"\n{target[1]}:" in makefile, (page, command)
        module = re.search(r"(?:^|\s)python -m ([a-z_.]+)", command)
        if module and module[1] != "pip":
            assert Path(ROOT, module[1].replace(".", "/") + ".py").exists(), (page, command)
        script = re.search(r"(?:^|\s)python ([a-z_/.]+)", command)
        if script:
            assert (ROOT / script[1]).exists(), (page, command)


def test_torchrun_takes_all_flags_without_two_dashes():
    """Its parser also sees what comes after the script's name: --run alone means --run-path."""
    from torch.distributed.run import get_args_parser

    every = set(re.findall(r"--[a-z][a-z-]*", config.training_parser().format_help()))
    for option in every - {"--run", "--help"}:
        get_args_parser().parse_args(["train_fsdp.py", option])


def test_flags_that_are_named_exist():
    known = {*re.findall(r'"(--[a-z-]+)"', SOURCE), *re.findall(r"--[a-z-]+", LAUNCH)}
    known |= set(re.findall(r"--[a-z][a-z-]*", plan.plan_parser().format_help()))
    known |= {"--" + row.name.replace("_", "-") for row in fields(finetune.Tuning)}
    # of torchrun, sbatch, pip, conda, apptainer and tensorboard
    known |= {"--standalone", "--nproc-per-node", "--nnodes", "--exclusive", "--gpus-per-node"}
    known |= {
        "--max-restarts",
        "--shutdown-timeout",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--local-addr",
    }
    known |= {"--index-url", "--help", "--base", "--nv", "--rocm", "--bind", "--logdir"}
    for page, text in PAGES.items():
        for code in re.findall(r"`([^`]+)`", text.replace("```", "")):
            assert {*re.findall(r"(?<![\w-])--[a-z-]+", code)} <= known, (page, code)


@pytest.mark.parametrize("page, count", [("docs/manual.md", 2), ("docs/downstream.md", 1)])
def test_plans_are_what_is_printed(page, count, capsys):
    found = [pair for pair in pairwise(blocks(PAGES[page])) if "python plan.py" in pair[0][1]]
    assert len(found) == count
    for (_, shell), (_, shown) in found:
        for line in shell.splitlines():
            _, _, *argv = line.removesuffix(" | sed -n 2p").split()  # python plan.py
            plan.main(argv)
        assert find_printed(shown, capsys.readouterr().out) == shown.splitlines()


# --- names and links


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    known = {*tracked(), *(Path(name).name for name in tracked())}
    for page, text in PAGES.items():
        for code in re.findall(r"`([^`\n]+)`", text):
            for name in re.findall(r"[\w/]+\.(?:py|md|sh)\b", code):
                assert name in known, (page, name)
