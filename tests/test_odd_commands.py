"""Odd values on every command line: one sentence and status 2, before anything starts."""

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import ROOT

import checkpoint
import plan
import prepare
import probe
import sweep
import train_fsdp
from runtime import ranges, topology
from runtime.flags import parse

PROGRAMS = {
    "train_fsdp.py": train_fsdp,
    "plan.py": plan,
    "runtime.topology": topology,
    "prepare.py": prepare,
    "checkpoint.py": checkpoint,
    "sweep.py": sweep,
    "probe.py": probe,
}
NO_NUMBERS = (
    "many",
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "9" * 5000,
    "-" + "9" * 400,
    "\u00b2",
    "\u0661",
    "1_0",
    "+1",
    " 1",
    "1\n",
    "0x10",
    "1,0",
    "\udcff",
)
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "1",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch, tmp_path):
    """No launcher's variables from the shell that runs the tests; a folder of its own."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


class Found(Exception):
    """Carries the parser of a program."""


def parsers(name: str) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """The parser that a program's `main` makes, and those of its commands, with their words."""

    def stop(self, *_):
        raise Found(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Found) as found:
            PROGRAMS[name].main([])
    (parser,) = found.value.args
    commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not commands:
        yield [], parser
    for action in commands:
        for command, own in action.choices.items():
            yield [command], own


def options(name: str) -> Iterator[tuple[list[str], argparse.Action]]:
    """The words of a command, and each of its arguments that takes a value."""
    for words, parser in parsers(name):
        for action in parser._actions:
            if action.nargs != 0 and "--help" not in action.option_strings:
                yield words, action


def bounds(action: argparse.Action) -> tuple[float, float] | None:
    """The range of a number; None for what is none."""
    found = inspect.getclosurevars(action.type).nonlocals if inspect.isfunction(action.type) else {}
    return (found["low"], found["high"]) if "low" in found else None


def positional(words: list[str]) -> list[str]:
    """What a command needs beside its flags."""
    one = {name: ["a"] for name in ("index", "scan", "stats", "verify")}
    one |= {name: ["a", "--data=b"] for name in probe.COMMANDS}
    one["finetune"] += ["--test=c"]
    return (one | {"pack": ["a", "b"]}).get(words[0] if words else "", [])


def outside(low: float, high: float) -> list[str]:
    """Numbers below and above a range."""
    step = 1 if isinstance(low, int) and isinstance(high, int) else 1e-9
    return [repr(low - step), repr(high * 2 + step), repr(-high - 1), "1" + "0" * 30]


def odd_lines(name: str) -> list[list[str]]:
    """Command lines with one odd value each, of every argument of a program."""
    lines = []
    for words, action in options(name):
        if not action.option_strings:
            continue
        limits = bounds(action)
        if limits:
            values = [*outside(*limits), *NO_NUMBERS]
        elif action.choices:
            values = ["typo", "", "NONE", "\udcff"]
        elif action.type in (None, sweep.Path):
            continue
        else:
            values = [""]
        shared = name in ("plan.py", "runtime.topology")
        if shared and action.dest in vars(parse([])):
            values = values[:2]  # the very flag of train_fsdp.py
        flag = action.option_strings[0]
        lines += [[*words, *positional(words), f"{flag}={value}"] for value in values]
    return lines


def refused(name: str, argv: list[str], capsys) -> str:
    """The sentence by which a program refuses a command."""
    try:
        status = PROGRAMS[name].main(argv)
    except SystemExit as leave:
        status = leave.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == "", (argv, status, printed)
    usage, _, sentence = printed.err.rpartition(": error: ")
    assert "Traceback" not in printed.err and sentence.strip() and sentence.count("\n") == 1, argv
    assert not usage or usage.startswith(("usage: ", name)), printed.err
    assert len(sentence) < 600, sentence
    return sentence


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_odd_value_of_any_flag_is_one_sentence(name, capsys):
    for argv in odd_lines(name):
        refused(name, argv, capsys)


def test_they_are_many():
    assert sum(len(odd_lines(name)) for name in PROGRAMS) > 500


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {"probe.py"}))  # --split or --test
def test_both_ends_of_a_range_are_taken_and_every_number_has_one(name):
    for words, parser in parsers(name):
        for action in parser._actions:
            assert action.type not in (int, float), action.dest
            limits = bounds(action)
            if limits and action.option_strings:
                flag = action.option_strings[0]
                for value in limits:
                    line = [*positional(words), f"{flag}={value}"]
                    line = ["quick", *line] if name == "sweep.py" else line
                    assert getattr(parser.parse_args(line), action.dest) == value


def test_what_is_a_number():
    assert [ranges.number(0, 2e9)(t) for t in ("1", "1.", ".5", "0.5e-3", "1E9", "-0")] == [
        1,
        1,
        0.5,
        5e-4,
        1e9,
        0,
    ]
    assert [ranges.whole(-3, 99)(t) for t in ("7", "-3", "007")] == [7, -3, 7]


BOTH = ("train_fsdp.py", "runtime.topology")
ALL = (*BOTH, "plan.py")


@pytest.mark.parametrize(
    ("programs", "line", "variables", "words"),
    [
        (ALL, "--warmup-steps 101", {}, "101 is more than the 100 --steps"),
        (ALL, "--steps 5 --warmup-steps 6", {}, "6 is more than the 5 --steps"),
        (ALL, "--mode full_shard --group 5", {}, "--group is for --mode hybrid"),
        (ALL, "--mode ddp --prefetch none", {}, "--prefetch is for --mode full_shard"),
        (ALL, "--group 3", {}, "cannot be split into shard groups of 3"),
        (ALL, "--batch 8 --global-batch 8", {}, "give one of them"),
        (ALL, "--global-batch 9 --accum 2", {}, "is not a multiple of"),
        (ALL, "--mode typo", {}, "invalid choice: 'typo'"),
        (ALL, "--profile-ranks 99", {}, "unrecognized arguments"),
        (ALL, "--profile --run io", {}, "--run io makes none"),
        (ALL, "surplus", {}, "unrecognized arguments: surplus"),
        (("train_fsdp.py", "plan.py"), "--img-size 225", {}, "is not a multiple of the patch size"),
        (("train_fsdp.py", "plan.py"), "--mask-ratio 1", {}, "at least one must stay"),
        (("train_fsdp.py", "plan.py"), "--mask-ratio 0", {}, "nothing to learn"),
        (("train_fsdp.py",), "--dry-run --world-size 100000000", {}, "--dry-run steps at most"),
        (BOTH, "", TORCHRUN | {"MASTER_PORT": "99999999"}, "MASTER_PORT is '99999999'"),
        (BOTH, "", TORCHRUN | {"WORLD_SIZE": "\u0662"}, "WORLD_SIZE is "),
        (BOTH, "", TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
        (BOTH, "", TORCHRUN | {"LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE is '-1'"),
        (BOTH, "", SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x99999999999)"}, "variables disagree"),
        (BOTH, "", SRUN | {"SLURM_TASKS_PER_NODE": "1(x\u00b2)"}, "must look like 8(x2)"),
        (BOTH, "", SRUN | {"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
        (
            ("train_fsdp.py",),
            "--dry-run --world-size 8",
            {"LOCAL_WORLD_SIZE": "x"},
            "LOCAL_WORLD_SIZE is 'x'",
        ),
        (("sweep.py",), "quick --nodes 1,,2", {}, "'' is not a whole number"),
        (("sweep.py",), "", {}, "required: PLAN"),
        (("prepare.py",), "", {}, "required: command"),
        (("prepare.py",), "unpack a", {}, "invalid choice: 'unpack'"),
        (("prepare.py",), "pack a", {}, "required: DST"),
        (("checkpoint.py",), "", {}, "required: command"),
        (("checkpoint.py",), "burn a", {}, "invalid choice: 'burn'"),
        (("checkpoint.py",), "ls a b", {}, "unrecognized arguments: b"),
        (("checkpoint.py",), "consolidate a", {}, "required: out"),
    ],
)
def test_values_that_do_not_go_together(programs, line, variables, words, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in programs:
        own = ["--device", "cpu"] if name in BOTH and "--dry-run" not in line else []
        assert words in refused(name, [*own, *line.split()], capsys)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 10**6,
        '{"a":' * 10**6,
        "null",
        "[]",
        "{}",
        "\ud800",
        "9" * 5000,
        "NaN",
        "\0",
        *(
            {field: value}
            for field, value in (
                ("peak_flops", 10**400),
                ("peak_flops", float("nan")),
                ("peak_flops", "1e12"),
                ("ranks_per_node", 10**400),
                ("ranks_per_node", 7.5),
                ("ranks_per_node", True),
                ("ranks_per_package", 0),
                ("ranks_per_package", 3),
                ("memory_gib", -1),
                ("name", None),
                ("name", "a\nb"),
                ("bandwidth_share", 0),
                ("fp32_share", 0),
                ("head_multiple", 0),
                ("hop_seconds", float("inf")),
                ("hop_seconds", [[[]]]),
                ("nonsense" * 1000, 1),
            )
        ),
    ],
)
def test_odd_machine_files(content, tmp_path, capsys):
    if isinstance(content, dict):
        content = json.dumps({"like": "frontier"} | content)
    path = tmp_path / "machine.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    assert "the machine file" in refused("plan.py", ["--machine", str(path)], capsys)


def start(program: str) -> list[str]:
    """The arguments of Python that start a script, or a module of a room."""
    return [str(ROOT / program)] if program.endswith(".py") else ["-m", program]


@pytest.mark.parametrize(
    "line",
    [
        "train_fsdp.py --img-size 100000",
        "sweep.py quick --ranks 0",
        pytest.param("train_fsdp.py --dry-run --timeout 1e14", marks=pytest.mark.full),
        pytest.param("runtime.topology --minutes 1e300", marks=pytest.mark.full),
        pytest.param("plan.py --mask-ratio inf", marks=pytest.mark.full),
        pytest.param("prepare.py pack a b --quality 101", marks=pytest.mark.full),
        pytest.param("checkpoint.py verify", marks=pytest.mark.full),
    ],
)
def test_a_process_of_its_own_does_the_same(line, tmp_path):
    program, *argv = line.split()
    done = subprocess.run(
        [sys.executable, *start(program), *argv],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert ": error: " in done.stderr.splitlines()[-1] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "imported"),
    [
        ("plan.py", "torch"),
        ("runtime.topology", "torch"),
        ("prepare.py", "torch"),
        ("sweep.py", "argparse"),
        ("probe.py", "argparse"),
    ],
)
def test_ctrl_c_during_the_imports_leaves_no_traceback(program, imported, tmp_path):
    """A real SIGINT, while an import that does not end is under way."""
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / f"{imported}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *start(program)],
        text=True,
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
