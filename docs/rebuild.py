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
from threading import Timer

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A command that is to be interrupted, on one line or several
INTERRUPTED = re.compile(r"^((?:.*\\\n)*.*# press Ctrl-C.*\n)", re.MULTILINE)
# plan.py ends with status 3 where a run does not fit, which is no failure of the page
ALLOWED = 'python() { command python "$@" || [ $? = 3 ]; }\n'
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC", "MAKE", "TEST_")


class Changed(Exception):
    """A command of the page fails, or no longer prints a line that the page shows."""


# --- Running


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
    output = ""
    for part in filter(str.strip, INTERRUPTED.split(content)):
        press = bool(INTERRUPTED.match(part))
        program = subprocess.Popen(
            [sys.executable, "-c", part]
            if language == "python"
            else ["bash", "-ec", ALLOWED + part],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit = Timer(1100, os.killpg, (program.pid, signal.SIGKILL))  # seconds
        limit.start()
        printed = ""
        steps = 0
        assert program.stdout
        for line in program.stdout:
            printed += line
            if line.startswith("step "):
                steps += 1
                if press and steps == 3:
                    os.killpg(program.pid, signal.SIGINT)
        status = program.wait()
        limit.cancel()
        failed = status != 0
        if press:
            failed = "the same command continues from there" not in printed
        if failed:
            raise Changed(f"{part}exit status {status}:\n{printed}")
        output += printed
    return output


# --- The page


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
    words = shown.split()
    others = printed.split()
    if len(words) != len(others):
        return False
    for word, other in zip(words, others, strict=True):
        if word != other and not re.search(r"\d", word):
            return False
    return True


def likeness(shown: str, printed: str) -> tuple[int, int]:
    """Count the names that two lines of the same words share, then their first equal words."""
    pairs = list(zip(shown.split(), printed.split(), strict=True))
    names = [a for a, b in pairs if a == b and re.search("[a-z]{2}", a)]
    first = 0
    while first < len(pairs) and pairs[first][0] == pairs[first][1]:
        first += 1
    return len(names), first


def find_printed(shown: str, output: str) -> list[str]:
    """Find each line of `shown` in an output, in order; Changed where one is not there.

    Of several lines with the same words, as the steps of a run, it takes the one with the same
    names of files, then the one of which most is the same, counted from the left.
    """
    printed = output.splitlines()
    found = []
    for line in shown.splitlines():
        fitting = [i for i, text in enumerate(printed) if same_words(line, text)]
        if not fitting:
            raise Changed(f"no longer prints, or not in this order: {line}\nbut:\n{output}")
        alike = [likeness(line, printed[i]) for i in fitting]
        chosen = fitting[alike.index(max(alike))]
        found.append(printed[chosen].rstrip())
        printed = printed[chosen + 1 :]
    return found


def rebuild_section(section: str, run: Callable[[str], str | None]) -> str:
    """Run the bash blocks of a section in order; return it with what they print now.

    `run` takes a block and returns its output, or None to leave what is shown as it is. Raises
    Changed.
    """
    command = ""
    output: str | None = None

    def renew(block: re.Match[str]) -> str:
        nonlocal command, output
        if block[1] == "bash":
            command = block[2]
            output = run(command)
        if block[1] or output is None:
            return block[0]
        try:
            lines = find_printed(block[2], output)
        except Changed as error:
            raise Changed(f"{command}{error}") from None
        return "\n".join(["```", *lines, "```"])

    return FENCE.sub(renew, section)


def main(argv: list[str]) -> int:
    """Rebuild sections of the page, by default all; return exit status 1 if one has changed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    found = sections(PAGE.read_text())
    numbers = [int(text) for text in argv] or list(found)
    failed = 0
    for number in numbers:
        for left in (ROOT / "out" / "guide").glob(f"{number}*"):  # by the last time
            if re.fullmatch(rf"{number}(-.*)?", left.name):
                shutil.rmtree(left)
        heading, _, _ = found[number].partition("\n")
        print(heading, flush=True)
        started = time.monotonic()
        try:
            run = partial(execute, "bash", folder=ROOT, env=environment(ROOT))
            section = rebuild_section(found[number], run)
            PAGE.write_text(PAGE.read_text().replace(found[number], section))
        except Changed as error:
            failed = 1
            print(f"section {number}: {error}")
        print(f"{time.monotonic() - started:.0f} seconds", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
