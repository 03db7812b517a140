"""docs/guide.md: its commands print what it shows; docs/rebuild.py, which runs them."""

import io
import json
import re
import shlex
import shutil
from contextlib import redirect_stdout
from decimal import Decimal
from functools import partial

import figures
import pytest
import rebuild
from conftest import ROOT
from ranks import Run, free_port, run_ranks, run_script, start_ranks
from test_docs import clone

import plan
from planner.machines import wire_bytes
from runtime import step_profile

TEXT = rebuild.PAGE.read_text() if rebuild.PAGE.exists() else ""
SECTIONS = rebuild.sections(TEXT)
# The end of a word with a time or a speed
UNIT = re.compile(r"(?:^|\d)(?:s|ms|min|seconds|(?:img|images|MB|GB)/s)[,.;:)]*$")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def agree(shown: str, printed: str) -> bool:
    """Hold a shown line against the one that was printed: the numbers agree within 1 %.

    Or in their last decimal. Those of time and speed may differ: before or with a unit of UNIT, a
    clock, and the percentages of such a line.
    """
    words, others = shown.split(), printed.split()
    units = [bool(UNIT.search(word)) for word in [*words, ""]]
    for i, (word, other) in enumerate(zip(words, others, strict=True)):
        timed = units[i] or units[i + 1] or re.search(r"\d:\d\d", word)
        if timed or ("%" in word and any(units)):
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

    Of a block with the comment `# numbers vary` the words alone, also behind a line with the word
    seconds.
    """
    vary = False
    pairs = zip(
        rebuild.blocks(section), rebuild.blocks(rebuild.rebuild_section(section, run)), strict=True
    )
    for (language, shown), (_, printed) in pairs:
        if language:
            vary = "# numbers vary" in shown
            continue
        for lines in zip(shown.splitlines(), printed.splitlines(), strict=True):
            assert vary or agree(*lines), "\nshown:   {}\nprinted: {}".format(*lines)
            vary = vary or "seconds" in lines[0]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("number", SECTIONS)
def test_a_section_prints_what_it_shows(number, tmp_path):
    run = partial(rebuild.execute, "bash", folder=tmp_path, env=clone(tmp_path))
    check_section(SECTIONS[number], run)


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


def test_sections_write_what_is_removed_before_they_run_again():
    """Below out/guide, each by a name that begins with its number."""
    for number, section in SECTIONS.items():
        shell = "".join(content for language, content in rebuild.blocks(section) if language)
        for name in re.findall(r"\bout/guide/([\w.-]+)", shell):
            assert re.fullmatch(rf"{number}([.-].*)?", name), name
        for name in re.findall(r"--out[ =](\S+)", shell):
            assert name.startswith("out/guide/"), name


# --- docs/rebuild.py

PAGE = """# Title

```bash
echo not in a section
```

## 0. Numbers and words

```bash
echo "a 1"; echo "loss 0.50 of 3" >&2
python -c 'import sys; print("rows 4,000")'
```

Text.

```
a 7
rows 1
```

## 1. Steps

```bash
mkdir -p out/guide && mkdir out/guide/1        # fails where it is there already
for i in 1 2 3 10; do echo "step $i/10  loss 0.$i"; done
```

```
step 1/10  loss 0.9
step 10/10  loss 0.1
```
"""
STEPS = """
trap 'echo the same command continues from there; touch saved; exit' INT
for i in 1 2 3 4 5 6 7 8 9; do echo "step $i"; sleep 0.2; done
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A small page in a folder of its own."""
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    monkeypatch.setattr(rebuild, "ROOT", tmp_path)
    monkeypatch.setattr(rebuild, "PAGE", path)
    return path


def test_rebuild_replaces_the_lines_shown(page, capsys):
    assert rebuild.main([]) == 0
    renewed = PAGE.replace("a 7\nrows 1\n", "a 1\nrows 4,000\n")
    # of the lines "step" that of the same step
    renewed = renewed.replace("loss 0.9\n", "loss 0.1\n").replace(
        "10/10  loss 0.1", "10/10  loss 0.10"
    )
    assert page.read_text() == renewed
    assert rebuild.main(["1"]) == 0 and page.read_text() == renewed
    assert re.search(r"^ +1 +0$", capsys.readouterr().out, re.MULTILINE)  # seconds of section 1


def test_rebuild_names_what_is_no_longer_printed(page, capsys):
    page.write_text(PAGE.replace("rows 1\n", "columns 1\n"))
    assert rebuild.main([]) == 1
    output = capsys.readouterr().out
    assert "section 0:" in output and "columns 1" in output and 'echo "a 1"' in output
    assert "10/10  loss 0.10\n" in page.read_text()  # the other section is renewed
    page.write_text(PAGE.replace('echo "a 1"', "false"))
    assert rebuild.main(["0"]) == 1 and "exit status 1" in capsys.readouterr().out
    assert rebuild.main(["2"]) == 2 and "sections 0, 1" in capsys.readouterr().out


def test_rebuild_presses_ctrl_c(tmp_path):
    (tmp_path / "train.sh").write_text(STEPS)
    content = "echo before\nbash \\\n  train.sh   # press Ctrl-C after a few lines\nls saved\n"
    output = rebuild.execute("bash", content, tmp_path, rebuild.environment(tmp_path))
    stopped = "the same command continues from there"
    assert output.splitlines() == ["before", "step 1", "step 2", "step 3", stopped, "saved"]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss  0.2500  norm 0.095", "loss  0.2501  norm 0.096", True),
        ("loss 0.2500", "loss 0.2600", False),
        ("lr 4.10e-07", "lr 4.11e-07", True),
        ("lr 4.10e-07", "lr 4.20e-07", False),
        ("2,263,488 parameters", "2,263,489 parameters", True),
        ("2 ranks", "3 ranks", False),
        ("out/step_00000100", "out/step_00000200", False),
        ("98.9 img/s  data wait 11.2 ms   2%", "9.9 img/s  data wait 0.2 ms   52%", True),
        ("100 steps in 55.1 s, top-1 60", "100 steps in 8.1 s, top-1 60", True),
        ("100 steps in 55.1 s, top-1 60", "90 steps in 8.1 s, top-1 60", False),
        ("ETA 0:00:00", "ETA 0:01:07", True),
        ("2.6% of memory", "6.6% of memory", False),
    ],
)
def test_numbers_agree_within_a_hundredth_but_for_times(shown, printed, same):
    assert agree(shown, printed) == same


# --- examples that the guide starts


def test_collectives_before_and_after(tmp_path):
    start_ranks(4, partial(run_script, ["examples/collectives.py"]), tmp_path, free_port(), 120)
    rows = [re.split(r"\s{2,}", line) for line in (tmp_path / "rank0.txt").read_text().splitlines()]
    assert rows[0] == ["4 ranks, gloo; S = 32 bytes"]
    whole = [" ".join(str(i * 10**rank) for i in range(1, 5)) for rank in range(4)]
    total, parts = "1111 2222 3333 4444", ["1", "20", "300", "4000"]
    expected = {
        "reduce": (whole, [total, "-", "-", "-"]),
        "broadcast": (whole, whole[:1] * 4),
        "all_reduce": (whole, [total] * 4),
        "all_gather": (parts, [" ".join(parts)] * 4),
        "reduce_scatter": (whole, total.split()),
    }
    for i, (kind, (before, after)) in enumerate(expected.items()):
        found = rows[2 + 4 * i : 6 + 4 * i]
        assert found[0][0] == kind.replace("_", "-")
        assert found[0].pop().endswith(f"= {wire_bytes(kind, 32, 4):g}")
        assert [row[-2:] for row in found] == [
            list(pair) for pair in zip(before, after, strict=True)
        ]


SLOW = (
    "examples/slow_disk.py 60 --model tiny --img-size 32 --batch 4 --steps 4 --log-every 1 "
    "--device cpu --precision fp32 --save-every none"
)


@pytest.mark.parametrize(
    "more",
    [
        "--workers 0",
        pytest.param("--workers 1", marks=pytest.mark.full),
        pytest.param("--workers 0 --stage-dir", marks=pytest.mark.full),
    ],
)
def test_a_slow_disk_is_what_the_log_says(more, tmp_path):
    """Seconds to read an image: 0.06 more; less with copies of those that were read before."""
    (images := tmp_path / "images").mkdir()
    for path in sorted(ROOT.glob("examples/tiles/train/desert/*.jpg"))[:8]:
        shutil.copy(path, images)
    argv = [*SLOW.split(), "--data", str(images), "--out", str(tmp_path / "out"), *more.split()]
    staged = argv[-1] == "--stage-dir"
    argv += [str(tmp_path / "disk")] if staged else []
    start_ranks(1, partial(run_script, argv), tmp_path, free_port(), 120)
    records = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    by_event = {record["event"]: record for record in records}
    (rank,) = by_event["io"]["ranks"]
    assert (rank["read_seconds"] < 0.06) == staged
    assert "workers 0" not in more or staged or by_event["end"]["data_share"] > 0.5


# --- docs/figures.py


def test_bars_of_the_input_are_those_of_the_logs(tmp_path, monkeypatch, capsys):
    rates = {"real": 10.0, "syn": 30.0, "io": 12.0}
    for run, rate in rates.items():
        records = {"event": "start", "run_mode": run}, {"event": "end", "images_per_second": rate}
        (tmp_path / f"8-{run}").mkdir()
        (tmp_path / f"8-{run}" / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    logs = [str(tmp_path / f"8-{run}" / "log.jsonl") for run in rates]
    panel = figures.draw_input(*logs).axes[0]
    assert [bar.get_height() for bar in panel.patches] == [*rates.values()]
    names = [tick.get_text().split(":")[0] for tick in panel.get_xticklabels()]
    assert names == [*rates]
    monkeypatch.setattr(figures, "HERE", tmp_path)
    assert figures.main(["input", *logs]) == 0
    assert (tmp_path / "guide" / "input.png").stat().st_size > 5000
    for wrong in (["input"], ["units"], ["nothing"], ["groups", "a file"]):
        assert figures.main(wrong) == 2 and "give some of" in capsys.readouterr().out


@pytest.mark.full
def test_pictures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "HERE", tmp_path)
    assert figures.main([]) == 0
    assert {path.stem for path in tmp_path.glob("guide/*.png")} == {*figures.PICTURES} - {
        *figures.FROM_FILES
    }


@pytest.mark.full
def test_the_timeline_has_the_collectives_of_each_unit(tmp_path):
    """Two gathers of each block and one of the root, one reduce-scatter of each."""
    argv = "--model nano --img-size 32 --batch 4 --steps 7 --profile 1 --workers 0 --device cpu"
    run_ranks(2, [Run([*argv.split(), "--mode", "full_shard"], params=False)], tmp_path)
    path = next(tmp_path.glob("**/rank_00000.json.gz"))
    trace = sorted(step_profile.read_trace(path), key=lambda event: event["ts"])
    found = [(lane, unit) for lane, _, unit in figures.collective_boxes(trace) if unit]
    blocks = ["b0", "b1", "d0", "d1"]
    expected = [("all-gather", unit) for unit in [*blocks, *blocks, "root"]]
    assert sorted(found) == sorted(expected + [("reduce-scatter", u) for u in [*blocks, "root"]])
    assert sorted(unit for *_, unit in figures.compute_boxes(trace)) == sorted(blocks * 2)
    assert figures.draw_units(str(path)).axes
