"""docs/guide.md and README's first hour: commands print what is shown; excerpts are the code."""

import io
import re
import shlex
from contextlib import redirect_stdout
from decimal import Decimal
from textwrap import indent

import figures
import pytest
import rebuild
from conftest import ROOT
from pages import clone
from ranks import read_log

import plan

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
@pytest.mark.minutes
def test_first_hour(tmp_path):
    """README's first hour prints what it shows; so does the section on the demo it has trained."""
    env = clone(tmp_path)
    outputs: dict[str, str] = {}

    def run(content: str) -> str:
        begin = " ".join(content.split()[:2])
        if begin != "make demo" or begin not in outputs:
            outputs[begin] = rebuild.execute("bash", content, tmp_path, env)
        return outputs[begin]

    _, _, rest = README.partition("\n## Your first hour\n")
    hour, _, _ = rest.partition("\n## ")
    rebuild.rebuild_section(hour, run)
    _, _, end = read_log(tmp_path / "out" / "demo" / "log.jsonl")
    assert end["loss"] < end["loss_of_mean_colour"] < end["loss_of_zero"]
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


@pytest.mark.full
def test_figures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "HERE", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    figures.main([])
    drawn = {path.stem for path in tmp_path.glob("docs/guide/*.png")}
    assert drawn == {*figures.FIGURES}
    assert drawn <= {*re.findall(r"\]\(guide/(\w+)\.png\)", TEXT)}
