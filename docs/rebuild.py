"""Run the commands of docs/guide.md, and put what they print now into the page.

    python docs/rebuild.py          # every section
    python docs/rebuild.py 3 4      # sections 3 and 4

A block without a language shows some lines of what the bash block above it printed, standard output
and error together. Each line shown is replaced by the line printed with the same words, whatever
its numbers. tests/test_guide.py runs the same commands and compares.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A command that is to be interrupted, on one line or several
INTERRUPTED = re.compile(r"^(?:.*\\\n)*.*# press Ctrl-C.*\n", re.MULTILINE)
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC", "MAKE", "TEST_")


class Changed(Exception):
    """A command of the page fails, or no longer prints a line that the page shows."""


# ---------------------------------------------------------------------------------------------
# Running


def environment(root: Path) -> dict[str, str]:
    """Return the environment of a plain shell without a GPU, with the Python of `root`/.venv."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    python = (str(root / ".venv" / "bin"), str(Path(sys.executable).parent))
    path = os.pathsep.join([*python, env.get("PATH", os.defpath)])
    return env | {"PATH": path, "TERM": "dumb", "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""}


def execute(language: str, content: str, folder: Path, env: dict[str, str]) -> str:
    """Run a bash or Python block in `folder`; return what it prints. Raises Changed if it fails.

    Its command with the comment `# press Ctrl-C` is interrupted, the others run to their end.
    """
    if found := INTERRUPTED.search(content):
        before, after = content[: found.start()], content[found.end() :]
        output = execute(language, before, folder, env) + interrupt(found[0], folder, env)
        return output + execute(language, after, folder, env)
    command = [sys.executable, "-c", content] if language == "python" else ["bash", "-ec", content]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        text=True,
        timeout=1100,  # seconds; the longest takes a few minutes
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise Changed(f"{content}exit status {done.returncode}:\n{done.stdout}")
    return done.stdout


def interrupt(command: str, folder: Path, env: dict[str, str]) -> str:
    """Run a training command until it prints its third step, press Ctrl-C; return its output."""
    program = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert program.stdout
    lines, steps = [], 0
    for line in program.stdout:
        lines.append(line)
        steps += line.startswith("step ")
        if steps == 3 and line.startswith("step "):
            os.killpg(program.pid, signal.SIGINT)
    program.wait(timeout=60)
    output = "".join(lines)
    if "the same command continues from there" not in output:
        raise Changed(f"{command}did not save when it was interrupted:\n{output}")
    return output


# ---------------------------------------------------------------------------------------------
# The page


def blocks(text: str) -> list[tuple[str, str]]:
    """List the code blocks of a page, as (language, content)."""
    return FENCE.findall(text)


def sections(text: str) -> dict[int, str]:
    """Find the sections of a page, `## 0. Title` and so on, by their number."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    found = {re.match(r"## (\d+)\. ", part): part for part in parts}
    return {int(heading[1]): part for heading, part in found.items() if heading}


def same_words(shown: str, printed: str) -> bool:
    """Tell whether two lines agree in all words without digits."""
    pairs = list(zip(shown.split(), printed.split(), strict=False))
    same = [a == b or bool(re.search(r"\d", a)) for a, b in pairs]
    return len(shown.split()) == len(printed.split()) and all(same)


def find_printed(shown: str, output: str) -> list[str]:
    """Find each line of `shown` in an output, in order; Changed where one is not there.

    Of several lines with the same words, as the steps of a run, it takes those with the same
    numbers, the first number of a line before the others.
    """
    printed = output.splitlines()
    # for the lines so far, among the first n printed: how much is the same, the lines chosen
    best: list[tuple[float, list[str]] | None] = [(0, [])] * (len(printed) + 1)
    for line in shown.splitlines():
        longer: list[tuple[float, list[str]] | None] = [None]
        for chosen, text in zip(best, printed, strict=False):
            options = [longer[-1]]
            if chosen and same_words(line, text):
                pairs = enumerate(zip(line.split(), text.split(), strict=True))
                same = sum(2.0**-i for i, (a, b) in pairs if a == b)
                options.append((chosen[0] + same, [*chosen[1], text.rstrip()]))
            longer.append(max(filter(None, options), key=lambda found: found[0], default=None))
        if not longer[-1]:
            raise Changed(f"no longer prints, or not in this order: {line}\nbut:\n{output}")
        best = longer
    assert best[-1]
    return best[-1][1]


def rebuild_section(section: str, run: Callable[[str], str | None]) -> str:
    """Run the bash blocks of a section in order; return it with what they print now.

    `run` takes a block and returns its output, or None to leave what is shown as it is. Raises
    Changed.
    """
    command, output = "", None

    def renew(block: re.Match[str]) -> str:
        nonlocal command, output
        if block[1] == "bash":
            command, output = block[2], run(block[2])
        if block[1] or output is None:
            return block[0]
        try:
            lines = find_printed(block[2], output)
        except Changed as error:
            raise Changed(f"{command}{error}") from None
        return "\n".join(["```", *lines, "```"])

    return FENCE.sub(renew, section)


def remove_output(number: int) -> None:
    """Remove what a section has left, out/guide/N or out/guide/N-NAME, so that it starts anew."""
    for path in (ROOT / "out" / "guide").glob(f"{number}*"):
        if re.fullmatch(rf"{number}([.-].*)?", path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(argv: list[str]) -> int:
    """Rebuild sections of the page, by default all; return exit status 1 if one has changed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    found = sections(PAGE.read_text())
    wanted = [int(text) for text in argv if text.isdigit()] or [*found]
    if not {*wanted} <= {*found} or len(wanted) < len(argv):
        print(f"{PAGE.name} has sections {', '.join(map(str, found))}: give the numbers of some")
        return 2
    run = partial(execute, "bash", folder=ROOT, env=environment(ROOT))
    seconds, failed = {}, []
    for number in wanted:
        remove_output(number)
        print(found[number].splitlines()[0], flush=True)
        started = time.monotonic()
        try:
            section = rebuild_section(found[number], run)
            text = PAGE.read_text()
            if found[number] not in text:
                raise Changed("the section was edited meanwhile: run it again")
            PAGE.write_text(text.replace(found[number], section))
        except Changed as error:
            failed.append(number)
            print(f"section {number}: {error}", flush=True)
        seconds[number] = time.monotonic() - started
    print("section  seconds")
    for number, took in seconds.items():
        print(f"{number:7}{took:9.0f}{'  failed' * (number in failed)}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
