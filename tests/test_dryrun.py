"""The dry run: what it refuses, as a real run does, and what it prints."""

import itertools
import re

import pytest
import torch.distributed as dist
from parity import TILES
from ranks import TINY_ARGV, environment, status_of
from simulated import ROWS, Watch

import train_fsdp

TINY = [*TINY_ARGV, "--batch", "2"]


def dry(ranks: int, flags: str) -> int:
    """Start a dry run of the tiny model on so many ranks."""
    return train_fsdp.main(
        [*TINY, *flags.split(), "--dry-run", "--world-size", str(ranks), "--out", "never-made"]
    )


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (3, "--group 2"),
        (1, "--data nowhere"),
        (3, "--mode ddp --group 3"),
        (3, "--keep 0"),
        (1, f"--data {TILES} --batch 200"),
        (1, "--resume nothing-here"),
    ],
)
def test_a_command_that_would_fail_fails_with_the_same_sentence(ranks, flags, monkeypatch, capsys):
    def run(more: list[str]) -> tuple[int, str]:
        status = status_of(train_fsdp.main, [*TINY, *flags.split(), *more])
        return status, capsys.readouterr().err

    dry = run(["--dry-run", "--world-size", str(ranks)])
    if ranks > 1:
        for name, value in environment(0, ranks, 1).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(8, ranks)))
    real = run([])
    assert real[0] == 2 and real[1].count("\n") == 1
    assert dry == real


def test_it_is_one_process_without_a_launcher(monkeypatch, capsys):
    """On a node without a GPU; a batch script may start it before srun, in a job."""
    for name, value in {"JOB_ID": "7", "NTASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert dry(16, "--device auto --cpu-offload --compile --group 4") == 0
    assert "16 ranks on cuda, mesh 4 x 4" in capsys.readouterr().out


def test_memory_is_planned_and_simulated(tmp_path, monkeypatch, capsys):
    """At the peak, with its parts. Other engines are not simulated, and it says so."""
    monkeypatch.chdir(tmp_path)
    larger = "--model base:depth=2,decoder_depth=1 --img-size 224 --batch 24"
    assert dry(4, f"{larger} --data {TILES} --mode hybrid --group 2 --accum 2 --ac full") == 0
    assert list(tmp_path.iterdir()) == [] and not dist.is_initialized()
    row = r"one step of rank 0, (\w+): ([\d.]+) GiB at the peak \((.+)\)"
    (how, *seen), (other, *planned) = re.findall(row, capsys.readouterr().out)
    assert (how, other) == ("simulated", "planned")
    for (whole, parts), known in (seen, ROWS), (planned, ROWS.values()):
        sizes = {part: float(size) for part, size in re.findall(r"(\w\D+) ([\d.]+)", parts)}
        assert {*sizes} <= {*itertools.chain(*known)}
        assert float(whole) == pytest.approx(sum(sizes.values()), abs=0.02)
    assert dry(4, "--mode full_shard --fsdp 1") == 0
    assert capsys.readouterr().out.endswith("but only an FSDP2 step is simulated\n")


def test_a_model_that_is_one_unit_is_gathered_once_as_announced(monkeypatch, capsys):
    watch = Watch()
    monkeypatch.setattr(train_fsdp, "forward_backward", watch.forward_backward)
    assert dry(4, "--mode full_shard --wrap root") == 0
    assert "per step: 1 all-gather" in capsys.readouterr().out
    sent = [kind for kind, _, _ in watch.sent]
    assert sent.count("all_gather") == 1


def test_accumulation_gathers_as_often_as_announced(monkeypatch, capsys):
    watch = Watch()
    monkeypatch.setattr(train_fsdp, "forward_backward", watch.forward_backward)
    assert dry(4, "--mode full_shard --wrap root --accum 3") == 0
    times = re.search(r"gathers and reduce-scatters (\d) times", capsys.readouterr().out)
    sent = [kind for kind, _, _ in watch.sent]
    assert sent.count("all_gather") == sent.count("reduce_scatter") == int(times[1]) == 3
