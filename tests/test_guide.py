"""docs/guide.md: its commands print what it shows; what it starts and draws."""

import io
import re
import shlex
from collections import Counter
from contextlib import redirect_stdout
from decimal import Decimal
from functools import partial
from textwrap import indent

import figures
import pytest
import rebuild
from conftest import ROOT
from images import copy_tiles
from pages import clone
from ranks import Run, free_port, read_log, read_records, run_ranks, run_script, start_ranks

import plan
from planner.machines import wire_bytes

TEXT = rebuild.PAGE.read_text()
SECTIONS = rebuild.sections(TEXT)
OF_THE_DEMO = 13  # begins with `make demo`
README = (ROOT / "README.md").read_text()
# The end of a word with a time or a speed
UNIT = re.compile(r"(?:^|\d)(?:s|ms|min|seconds|(?:img|images|MB|GB)/s)[,.;:)]*$")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def agree(shown: str, printed: str) -> bool:
    """Hold a shown line against the one that was printed: the numbers agree within 1 %.

    Or in their last decimal. Those of time and speed may differ: before or with a unit of UNIT, a
    clock, and the percentages of such a line.
    """
    words = shown.split()
    others = printed.split()
    units = [bool(UNIT.search(word)) for word in [*words, ""]]
    for i, (word, other) in enumerate(zip(words, others, strict=True)):
        if units[i] or units[i + 1] or re.search(r"\d:\d\d", word):
            continue
        if "%" in word and any(units):
            continue
        if NUMBER.sub("#", word) != NUMBER.sub("#", other):
            return False
        for pair in zip(NUMBER.findall(word), NUMBER.findall(other), strict=True):
            a, b = (Decimal(number.rstrip(",").replace(",", "")) for number in pair)
            last = Decimal(1).scaleb(int(a.as_tuple().exponent)) if "." in pair[0] else Decimal(0)
            if abs(a - b) > max(abs(a) / 100, last):
                return False
    return True


def check_section(section: str, run) -> None:
    """Hold all that a section shows against what its commands print.

    Of a block with the comment `# numbers vary` the words alone, which `find_printed` compares.
    """
    vary = False
    renewed = rebuild.blocks(rebuild.rebuild_section(section, run))
    for (language, shown), (_, printed) in zip(rebuild.blocks(section), renewed, strict=True):
        if language:
            vary = "# numbers vary" in shown
        elif not vary:
            for lines in zip(shown.splitlines(), printed.splitlines(), strict=True):
                assert agree(*lines), "\nshown:   {}\nprinted: {}".format(*lines)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("number", SECTIONS.keys() - {OF_THE_DEMO})
def test_a_section_prints_what_it_shows(number, tmp_path):
    env = clone(tmp_path)

    def run(content: str) -> str:
        planned = run_plans(content)  # in this process: importing torch takes long
        if planned is not None:
            return planned
        return rebuild.execute("bash", content, tmp_path, env)

    check_section(SECTIONS[number], run)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.minutes
def test_first_hour(tmp_path):
    """README's first hour; then the section on the demo, which the hour has trained already."""
    env = clone(tmp_path)
    first_screen, rest = README.split("\n## Your first hour\n")
    (_, shell), *_ = rebuild.blocks(first_screen)
    one_process = next(line for line in shell.splitlines() if line.startswith("python train"))
    rebuild.execute("bash", one_process.replace("--model", "--steps 2 --model"), tmp_path, env)
    section, _, _ = rest.partition("\n## ")
    _, *hour = section.split("\n### ")
    outputs = {}
    for step in hour:
        output = ""
        for language, content in rebuild.blocks(step):
            if language:
                output = rebuild.execute(language, content, tmp_path, env)
                outputs[" ".join(content.split()[:2])] = output
            else:
                rebuild.find_printed(content, output)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 5000
    demo = tmp_path / "out" / "demo"
    _, _, end = read_log(demo / "log.jsonl")
    (held_out,) = read_records(demo / "log.jsonl", "eval")
    assert held_out["eval_loss"] < 0.7 * held_out["loss_of_mean_colour"]
    assert end["loss"] < end["loss_of_mean_colour"] < end["loss_of_zero"]
    assert (demo / "picture.png").exists()

    def run(content: str) -> str:
        if content.startswith("make demo"):
            return outputs["make demo"]
        return rebuild.execute("bash", content, tmp_path, env)

    check_section(SECTIONS[OF_THE_DEMO], run)


def run_plans(content: str) -> str | None:
    """What a block of nothing but plans prints; None for any other block."""
    output = io.StringIO()
    for line in content.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] != ["python", "plan.py"] or {*words} & {"|", ">", "&&"}:
            return None
        with redirect_stdout(output):
            plan.main(words[2:])
    return output.getvalue()


def test_plans_print_what_is_shown():
    for section in SECTIONS.values():
        check_section(section, run_plans)


# --- code in the page, and examples that the guide starts


def test_excerpts_are_in_the_files():
    """The lines between two `...` stand in the file in one piece, at whatever indentation."""
    excerpts = [content for language, content in rebuild.blocks(TEXT) if language == "python"]
    assert len(excerpts) >= 7
    for excerpt in excerpts:
        head, _, lines = excerpt.partition("\n")
        name, _, _ = head.removeprefix("# ").partition(":")
        code = (ROOT / name).read_text()
        for part in lines.split("\n...\n"):
            part = part.rstrip()
            assert any(indent(part, " " * n) in code for n in (0, 4, 8)), f"{head}\n{part}"


def test_collectives_before_and_after(tmp_path):
    start_ranks(4, partial(run_script, ["examples/collectives.py"]), tmp_path, free_port(), 120)
    rows = [re.split(r"\s{2,}", line) for line in (tmp_path / "rank0.txt").read_text().splitlines()]
    assert rows[0] == ["4 ranks, gloo; S = 32 bytes"]
    whole = [" ".join(str(i * 10**rank) for i in range(1, 5)) for rank in range(4)]
    total = "1111 2222 3333 4444"
    parts = ["1", "20", "300", "4000"]
    expected = {
        "broadcast": (whole, whole[:1] * 4),
        "all_reduce": (whole, [total] * 4),
        "all_gather": (parts, [" ".join(parts)] * 4),
        "reduce_scatter": (whole, total.split()),
    }
    for i, (kind, (before, after)) in enumerate(expected.items()):
        found = rows[2 + 4 * i : 6 + 4 * i]
        assert found[0][0] == kind.replace("_", "-")
        assert found[0].pop().endswith(f"= {wire_bytes(kind, 32, 4):g}")
        shown = [(row[-2], row[-1]) for row in found]
        assert shown == [*zip(before, after, strict=True)]


SLOW = (
    "examples/slow_disk.py 60 --model tiny --img-size 32 --batch 4 --steps 4 --log-every 1 "
    "--device cpu --precision fp32 --save-every none --workers 0"
)


def test_a_slow_disk_is_what_the_log_says(tmp_path):
    """Seconds to read an image: 0.06 more, of four in a step."""
    copy_tiles(tmp_path / "images", 8)
    argv = [*SLOW.split(), "--data", str(tmp_path / "images"), "--out", str(tmp_path / "out")]
    start_ranks(1, partial(run_script, argv), tmp_path, free_port(), 120)
    _, steps, end = read_log(tmp_path / "out" / "log.jsonl")
    assert steps[-1]["data_seconds"] >= 4 * 0.06
    assert end["data_wait_fraction"] > 0.1


# --- docs/figures.py


@pytest.mark.full
def test_figures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "HERE", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    figures.main([])
    drawn = {path.stem for path in tmp_path.glob("docs/guide/*.png")}
    assert drawn == {*figures.FIGURES}
    assert drawn | {"units"} == {*re.findall(r"\]\(guide/(\w+)\.png\)", TEXT)}


@pytest.mark.full
def test_the_timeline_has_the_collectives_of_each_unit(tmp_path):
    """Two gathers of each block and one of the root, one reduce-scatter of each."""
    argv = "--model nano --img-size 32 --batch 4 --steps 7 --profile 1 --workers 0 --device cpu"
    run_ranks(2, [Run([*argv.split(), "--mode", "full_shard"], params=False)], tmp_path)
    path = str(next(tmp_path.glob("**/rank_00000.json.gz")))
    boxes = figures.unit_boxes(figures.read_trace(path))
    found = Counter((lane, unit) for lane, _, _, unit in boxes if unit)
    expected = Counter({("all-gather", "root"): 1, ("reduce-scatter", "root"): 1})
    for unit in ("b0", "b1", "d0", "d1"):
        expected += {("blocks", unit): 2, ("all-gather", unit): 2, ("reduce-scatter", unit): 1}
    assert found == expected
    assert figures.draw_units(path).axes
