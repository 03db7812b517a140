"""One rank's trouble is a sentence on every rank; a bug keeps its traceback, where it is."""

import os
import re
import signal
import sys

import pytest
import torch
from conftest import ROOT
from parity import TILES
from ranks import environment, fork_server, free_port

TRAIN = (
    f"--model tiny --img-size 32 --batch 2 --steps 3 --log-every 1 --workers 0 --device cpu "
    f"--timeout 30 --data {TILES}"
)


def error_in(owner, name, error, steps_before=0):
    """The attribute of a module raises, once it was called so often."""
    original, calls = getattr(owner, name), []

    def fail(*args, **kwargs):
        calls.append(name)
        if len(calls) > steps_before:
            raise error
        return original(*args, **kwargs)

    setattr(owner, name, fail)


def gpu_error_in_copy():
    original = torch.Tensor.to

    def to(self, *args, **kwargs):
        if self.dtype == torch.uint8 and self.dim() == 4:
            raise torch.OutOfMemoryError("HIP out of memory")
        return original(self, *args, **kwargs)

    torch.Tensor.to = to


def no_memory_in_step():
    """The host's allocator itself refuses, in the second step."""
    import train_fsdp

    original, calls = train_fsdp.train_step, []

    def train_step(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            torch.empty(2**58, dtype=torch.uint8)
        return original(*args, **kwargs)

    train_fsdp.train_step = train_step


def igloo_in_step():
    import train_fsdp

    error_in(train_fsdp, "train_step", RuntimeError("igloo"), 1)


def bug_on_rank_0():
    from runtime import image_source

    error_in(image_source, "find_images", TypeError("a bug"))


def bug_in_staging():
    from storage import staging

    error_in(staging, "Staged", TypeError("a bug"))


def full_node_disk():
    from storage import staging

    error_in(staging, "Staged", OSError(28, "No space left on device", "/node"))


def bug_in_topology():
    from runtime import topology

    error_in(topology, "find_placement", KeyError("a bug"))


def planner_bug():
    from planner import estimate

    error_in(estimate, "make_plan", ZeroDivisionError("a bug"))


def no_folder():
    from runtime import image_source

    there = image_source.os.path.isdir
    image_source.os.path.isdir = lambda path: str(path) != str(TILES) and there(path)


def out_of_files():
    import resource

    import data

    original = data.build_loader

    def build(*args, **kwargs):
        loader = original(*args, **kwargs)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, used + 100))
        return loader

    data.build_loader = build


def killed_in_step():
    import shard

    original, calls = shard.autocast, []

    def autocast(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    shard.autocast = autocast


def a_gpu_here():
    import mesh

    mesh.pick_device = lambda name, ranks: torch.device("cuda", 0)
    torch.cuda.set_device = lambda device: None


def become(environ, output, errors, fault, argv):
    """A rank that trains, with a fault of its own."""
    os.setsid()
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(environ)
    os.chdir(ROOT)
    import train_fsdp

    fault()
    sys.exit(train_fsdp.main(argv))


def train(folder, world, at, fault, *more):
    """(status, stdout, stderr) of each rank; the fault happens on rank `at`."""
    (folder / "out").mkdir()
    port, ranks = free_port(), []
    argv = [*TRAIN.split(), "--out", str(folder / "out"), *more]
    for rank in range(world):
        given = environment(rank, world, port) | {"FOLDER": str(folder)}
        paths = str(folder / f"output{rank}"), str(folder / f"errors{rank}")
        own = fault if rank == at else int
        ranks.append(fork_server().Process(target=become, args=(given, *paths, own, argv)))
        ranks[-1].start()
    try:
        for process in ranks:
            process.join(100)
    finally:
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
    texts = [
        [(folder / f"{kind}{rank}").read_text() for kind in ("output", "errors")]
        for rank in range(world)
    ]
    assert not hung, texts
    return [(process.exitcode, *text) for process, text in zip(ranks, texts, strict=True)]


LOST = r"error: rank \d: lost connection to another rank \("
STAGE = ["--stage-dir", "/tmp/nowhere-to-stage"]
# name: (ranks, the one with the fault, fault, more flags,
#        {rank: (status, a bug's last line or None, sentence or None)})
FAULTS = {
    "a GPU error in the copy": (
        1,
        0,
        gpu_error_in_copy,
        [],
        {0: (1, None, r"rank 0: out of memory \(.*\): HIP out of memory; plan: FITS: ")},
    ),
    "out of memory": (
        2,
        1,
        no_memory_in_step,
        ["--mode", "full_shard"],
        {
            0: (1, None, LOST),
            1: (1, None, r"rank 1: out of memory \(training in step 2, .* tried to allocate 288"),
        },
    ),
    "igloo": (1, 0, igloo_in_step, [], {0: (1, "RuntimeError: igloo", None)}),
    "igloo of two": (
        2,
        1,
        igloo_in_step,
        [],
        {0: (1, None, LOST), 1: (1, "RuntimeError: igloo", None)},
    ),
    "killed": (
        2,
        1,
        killed_in_step,
        ["--mode", "full_shard"],
        {0: (1, None, LOST), 1: (-9, None, None)},
    ),
    "killed, ddp": (
        2,
        1,
        killed_in_step,
        ["--mode", "ddp"],
        {0: (1, "RuntimeError: ", "lost connection to another rank"), 1: (-9, None, None)},
    ),
    "a bug while rank 0 lists": (
        2,
        0,
        bug_on_rank_0,
        [],
        {0: (1, "TypeError: a bug", "error: TypeError: a bug"), 1: (1, None, None)},
    ),
    "a bug in staging": (
        2,
        1,
        bug_in_staging,
        STAGE,
        {0: (1, None, r"error: TypeError: a bug \(rank 1\)"), 1: (1, "TypeError: a bug", None)},
    ),
    "a full node": (
        2,
        1,
        full_node_disk,
        STAGE,
        {0: (2, None, r"No space left on device.* \(rank 1\)"), 1: (2, None, None)},
    ),
    "a bug in topology": (
        2,
        1,
        bug_in_topology,
        [],
        {0: (1, None, LOST), 1: (1, "KeyError: 'a bug'", None)},
    ),
    "no folder": (
        2,
        1,
        no_folder,
        [],
        {0: (2, None, r"there is no folder .* \(rank 1\)"), 1: (2, None, None)},
    ),
    "out of files": (
        2,
        1,
        out_of_files,
        ["--workers", "1"],
        {0: (1, None, LOST), 1: (1, None, "rank 1: the data loader failed .*Too many open files")},
    ),
    "one GPU": (
        2,
        0,
        a_gpu_here,
        [],
        {0: (2, None, "error: rank 1 found no GPU, others did"), 1: (2, None, None)},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank(name, tmp_path):
    world, at, fault, more, expected = FAULTS[name]
    for rank, (status, _, errors) in enumerate(train(tmp_path, world, at, fault, *more)):
        wanted, bug, sentence = expected[rank]
        assert status == wanted, errors
        assert ("Traceback" in errors) == bool(bug), errors
        assert not bug or re.search(rf"(?m)^(\[rank\d\]: )?{bug}", errors), errors
        told = re.findall(r"(?m)^train_fsdp.py: (error: .*)", errors)
        assert len(told) == bool(sentence), errors
        assert not sentence or re.search(sentence, told[0]), errors


def test_the_planner_ends_no_run(tmp_path):
    (status, output, errors), (other, _, more) = train(tmp_path, 2, 0, planner_bug)
    assert (status, other) == (0, 0), errors + more
    assert output.count("warning: no plan of memory and traffic: ZeroDivisionError: a bug") == 1
    assert "Traceback" not in errors + more
