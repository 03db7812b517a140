"""What the layout and the style promise, checked against the files themselves."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from PIL import Image
from ranks import environment, free_port

LAUNCH = (ROOT / "launch_frontier.sh").read_text()
ROOMS = ["runtime", "storage", "planner", "sweeps", "downstream"]
FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path
    for path in (*ROOT.glob("*.py"), *(p for room in ROOMS for p in (ROOT / room).glob("*.py")))
    if path.name != "__init__.py"
}
# They work when copied alone.
ALONE = [
    "vit",
    "data",
    "mesh",
    "shard",
    "runtime/agreement",
    "checkpoint",
    "runtime/cpu_kernels",
    "runtime/step_profile",
    "runtime/comm_counter",
    "runtime/peak_flops",
]
LEAVES = ["runtime/ranges", "runtime/terminal"]  # of the standard library alone
TOP = ["vit", "data", "mesh", "shard", "train_fsdp", "checkpoint", "prepare", "plan", "sweep"]
TOP += ["probe", "convert"]
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


# --- the top level and the rooms


def test_top_level_is_what_is_read_run_or_copied():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in listed.stdout.splitlines() if "/" not in name}
    assert {name for name in tracked if name.endswith((".py", ".sh"))} == {
        *(f"{name}.py" for name in TOP),
        "launch_frontier.sh",
    }


def test_each_room_says_what_is_in_it():
    for room in ROOMS:
        text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
        for path in (ROOT / room).glob("*.py"):
            assert path.stem == "__init__" or re.search(rf"\b{path.stem}\b", text), path
    assert len(FILES) > 25  # none of the rules below is blind to a room


def test_imports_point_down():
    """A room imports files to read or copy, and runtime; the dry run and
    fine-tuning alone import the main job."""
    below = {"vit", "data", "mesh", "shard", "checkpoint"}
    allowed = {
        "runtime": below | {"runtime", "storage", "planner", "downstream"},
        "storage": {"vit", "data", "mesh", "shard", "runtime", "storage"},
        "planner": below | {"runtime", "planner"},
        "sweeps": below | {"runtime", "sweeps", "planner"},
        "downstream": below | {"runtime", "downstream"},
    }
    for name, tree in TREES.items():
        found = {module.partition(".")[0] for module in imported_by(tree.body)}
        ours = found & {*TOP, *ROOMS}
        if name in ("planner/dry_run", "downstream/finetune"):  # for its step, for its loop
            ours -= {"train_fsdp"}
        assert "train_fsdp" not in ours, name
        assert ours <= allowed.get(name.partition("/")[0], {*TOP, *ROOMS}), (name, ours)


# --- launch_frontier.sh


def test_launch_script_is_clean():
    subprocess.run(["bash", "-n", "launch_frontier.sh"], cwd=ROOT, check=True)
    assert os.access(ROOT / "launch_frontier.sh", os.X_OK)
    assert "\nset -euo pipefail\n" in LAUNCH
    assert max(map(len, LAUNCH.splitlines())) <= 100
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: `make test-slurm` installs it")
    found = subprocess.run(
        ["shellcheck", "launch_frontier.sh", ".ci/run"], cwd=ROOT, text=True, capture_output=True
    )
    assert found.returncode == 0, found.stdout


def test_each_export_of_the_launch_script_has_its_reason():
    lines = LAUNCH.splitlines()
    exports = [i for i, line in enumerate(lines) if "export " in line]
    assert len(exports) == 5
    for i in exports:
        before = lines[i - 2] if lines[i - 1].endswith("||") else lines[i - 1]
        assert before.startswith("# "), lines[i]


# --- layout and style


def imported_by(parts: list[ast.stmt]) -> set[str]:
    """The names of modules that these statements import, whole."""
    return {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def test_each_file_imports_no_sibling_but_the_main_job():
    """Except by `main`: a file works alone, its command line may read flags with the others."""
    for name in [*ALONE, *LEAVES]:
        body = TREES[name].body
        parts = [n for n in body if getattr(n, "name", "") != "main" and not isinstance(n, ast.If)]
        imported = {module.partition(".")[0] for module in imported_by(parts)}
        assert not imported & {*TOP, *ROOMS}, name
        third_party = imported - set(sys.stdlib_module_names)
        allowed = {"torch", "torchvision", "numpy", "PIL"} if name in ALONE else set()
        assert third_party <= allowed, name


def test_nothing_runs_at_import():
    """Definitions, constants, and the guard of the main job: nothing else at module level."""
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.Expr):
                assert isinstance(node.value, ast.Constant), (name, node.lineno)  # docstring
            elif isinstance(node, ast.If):
                assert ast.unparse(node.test) == "__name__ == '__main__'"
            else:
                allowed = (
                    ast.Import,
                    ast.ImportFrom,
                    ast.FunctionDef,
                    ast.ClassDef,
                    ast.Assign,
                    ast.AnnAssign,
                )
                assert isinstance(node, allowed), (name, node.lineno)


@pytest.mark.slow
def test_import_changes_nothing(tmp_path):
    code = """
import os, signal, threading, torch, warnings
def state():
    return (torch.get_rng_state().sum().item(), torch.get_default_dtype(), torch.get_num_threads(),
            threading.active_count(), dict(os.environ), os.listdir("."),
            [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
            torch.distributed.is_initialized(), torch.cuda.is_initialized())
import torch.distributed.fsdp, torch.distributed.optim, torchvision.transforms
import matplotlib.figure
before = state()
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
after = state()
assert before == after, (before, after)
"""
    names = [name.replace("/", ".") for name in FILES]
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(0, 1, 0),
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr


def test_args_is_seen_by_main_and_the_parser_only():
    for name, tree in TREES.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                given = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
                subcommand = name.startswith("downstream/") and function.name == "run"
                if "args" in given and not subcommand:
                    assert (name, function.name) in {
                        ("runtime/flags", "clashes"),
                        ("runtime/flags", "default_mode"),
                        ("runtime/flags", "make_config"),
                    }


def test_public_functions_have_docstrings_and_types():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert node.returns is not None, (name, node.name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), (name, node.name)


JOBS = {
    "step_profile": """
import contextlib, torch
import step_profile
w = torch.ones(8, 8)
profile = step_profile.StepProfile(0, 2, torch.device("cpu"), "traces", contextlib.nullcontext,
                                   report=print)
for step in range(8):
    with profile.step(step):
        w @ w
events = step_profile.read_trace(profile.folder / "rank_00000.json.gz")
assert sum(e["name"] == "aten::mm" for e in events) == 2
""",
    "comm_counter": """
import torch, torch.distributed as dist, comm_counter
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
grid, found = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")), []
batch = torch.ones(6)
with comm_counter.counting(grid, found):
    dist.all_reduce(batch)
    dist.all_gather_into_tensor(torch.empty(6), batch, group=grid.get_group("shard"))
dist.all_reduce(batch)
assert [(c.kind, c.size) for c in found] == [("all_reduce", 24), ("all_gather", 24)]
sizes = {"replicate": 2, "shard": 2, "world": 4}
assert comm_counter.payload(found, sizes) == {"all_reduce": 24, "all_gather": 24}
assert comm_counter.payload(found, dict.fromkeys(sizes, 1)) is None
del grid
dist.destroy_process_group()
""",
    "cpu_kernels": """
import torch
import cpu_kernels
layer = torch.nn.Linear(4, 3)
cpu_kernels.apply_to(layer)
layer(torch.ones(2, 4)).sum().backward()
assert layer.weight.grad.tolist() == [[2.0] * 4] * 3
q = torch.zeros(1, 2, 5, 4)
assert torch.equal(cpu_kernels.cpu_attention(q, q, q + 7), q + 7)
assert cpu_kernels.attention_kernel(2, 4, 5, q.dtype, q.device) == "plain"
""",
    "vit": """
import torch, vit
model = vit.ViTMAE(vit.MODELS["tiny"], 32)
loss, pred, mask = model(torch.randn(2, 3, 32, 32))
loss.backward()
assert pred.shape == (2, 16, 192) and mask.sum() == 24 and model.cls_token.grad.abs().sum() > 0
""",
    "data": """
import sys, data
if __name__ == "__main__":
    files = data.scan(sys.argv[1])
    loader = data.build_loader(files, img_size=32, patches=16, seed=0, global_batch=8,
                               local_batch=8, steps=range(2), workers=1)
    batches = list(loader)
    assert len(files) == 192 and len(files.classes) == 8 and len(batches) == 2
    assert data.normalize(batches[0].image).shape == (8, 3, 32, 32)
""",
    "mesh": """
import os, torch, mesh
ranks = mesh.read_ranks(os.environ)
mesh.init_ranks(ranks, mesh.pick_device("cpu", ranks))
grid = mesh.build_mesh((1, 1), torch.device("cpu"))
assert grid.mesh_dim_names == ("replicate", "shard")
del grid  # or its groups would be taken apart as the interpreter is
torch.distributed.destroy_process_group()
""",
    "peak_flops": """
import torch, peak_flops
assert peak_flops.peak_flops(torch.device("cpu")) == (None, "not known for a CPU")
""",
    "agreement": """
import torch, torch.distributed as dist, agreement
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert agreement.run_on_rank0(lambda: 7) == 7 and agreement.gather_to_rank0(8) == [8]
try:
    agreement.run_on_all_ranks(lambda: [][0])
except agreement.AgreedError as error:
    assert error.status == 1
else:
    raise SystemExit("no error")
dist.destroy_process_group()
""",
    "step_guard": """
import torch, torch.distributed as dist, step_guard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
guard = step_guard.StepGuard(torch.device("cpu"))
assert guard.vote(torch.tensor(1.0), torch.tensor(1.0)) == 0
assert guard.vote(torch.tensor(float("nan")), torch.tensor(1.0)) == 1
assert guard.read(0).consecutive == 0 and guard.read(1).consecutive == 1
dist.destroy_process_group()
""",
    "meter": """
import meter
clocks = meter.Meter(0, 4)
with clocks.data_wait():
    pass
seconds, waited = clocks.interval(2)
assert 0 <= waited <= seconds and clocks.summary()["images_per_second"] == 4 / seconds
""",
    "signals": """
import os, signal, signals
received = signals.collect()
os.kill(os.getpid(), signal.SIGUSR1)
assert received == [signal.SIGUSR1]
""",
    "watchdog": """
import torch, torch.distributed as dist, watchdog
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
watch = watchdog.Watchdog(0, 1, {}, seconds=60, startup_factor=4, folder="x", give_up=print)
watch.heartbeat("training", 3)
assert watch.where().startswith("training in step 4, on ")
watch.stop()
dist.destroy_process_group()
""",
    "shard": """
import torch, torch.distributed as dist, shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
for mode in shard.STRATEGIES:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    decay = shard.weight_decay_names(model)
    model = shard.apply(model, mode, grid, block_classes={torch.nn.Linear},
                        values=lambda name, shape, device: torch.ones(shape),
                        options=shard.ShardingOptions(param_dtype=torch.float32))
    optimizer = shard.build_optimizer(model, mode, decay, lr=0.1, weight_decay=0.0)
    out = model(torch.ones(1, 4))
    assert out.tolist() == [[21.0, 21.0]]
    out.sum().backward()
    assert shard.clip_grad_norm(model, 1.0) > 1
    shard.optimizer_step(optimizer, torch.tensor(0.0))
    assert model(torch.ones(1, 4)).sum() < 42
dist.destroy_process_group()
""",
    "checkpoint": """
import torch, torch.distributed as dist, checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer
(model, optimizer), (other, its) = trained(1), trained(2)
assert checkpoint.Saver(".", model, optimizer).save(7, {}) == []
assert not torch.equal(model.weight, other.weight)
assert checkpoint.load(checkpoint.list_checkpoints(".")[-1], other, its)["step"] == 7
assert torch.equal(model.weight, other.weight)
assert torch.equal(optimizer.state[model.bias]["exp_avg"], its.state[other.bias]["exp_avg"])
assert checkpoint.main(["verify", "step_00000007"]) == 0
dist.destroy_process_group()
""",
}


# Each job in a process forked from one that has imported torch alone.
FORK = """
import os, runpy, sys, traceback
import torch, torchvision, torch.distributed.checkpoint, torch.distributed.fsdp
failed = []
for folder in sys.argv[2:]:
    child = os.fork()
    if not child:
        status = 1
        try:
            os.chdir(folder)
            sys.path[0], sys.argv = folder, ["job.py", sys.argv[1]]
            runpy.run_path(f"{folder}/job.py", run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    if os.waitpid(child, 0)[1]:
        failed.append(os.path.basename(folder))
sys.exit(f"failed: {failed}" if failed else 0)
"""


@pytest.mark.slow
def test_each_file_works_alone_in_an_empty_folder(tmp_path):
    folders = []
    for name in ALONE:
        folders.append(tmp_path / name.replace("/", "."))
        folders[-1].mkdir()
        shutil.copy(FILES[name], folders[-1])
        (folders[-1] / "job.py").write_text(JOBS[FILES[name].stem])
    env = environment(0, 1, free_port())
    for variable in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del env[variable]
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(ROOT / "examples" / "tiles" / "train"), *folders],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr


# --- the embedded images


def test_nothing_tracked_is_a_link():
    """A linked virtual environment once got into a commit: to git, `/.venv/` is a folder only."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True)
    modes = {line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == {"100644", "100755"}
    names = {line.rpartition("/")[2] for line in listed.stdout.splitlines()}
    assert not names & {"log.jsonl", "done", "latest", "port"}  # nor what a run leaves behind


def test_tiles():
    tiles = ROOT / "examples" / "tiles"
    classes = sorted(p.name for p in (tiles / "train").iterdir())
    assert len(classes) == 8 == len(list((tiles / "heldout").iterdir()))
    for name in classes:
        train, heldout = ([*(tiles / split / name).glob("*.jpg")] for split in ("train", "heldout"))
        assert len(train) == 24 and len(heldout) == 8
        regions = [
            {p.stem.removeprefix(f"{name}_").rsplit("_", 1)[0] for p in split}
            for split in (train, heldout)
        ]
        assert len(regions[0]) >= 2 and not regions[0] & regions[1]
        for path in itertools.chain(train, heldout):
            with Image.open(path) as image:
                assert image.format == "JPEG" and image.mode == "RGB"
                assert min(image.size) >= 96
                assert len(set(image.convert("L").getdata())) > 1, f"{path} is one colour"
    total = sum(p.stat().st_size for p in tiles.rglob("*") if p.is_file())
    assert total < 4 * 2**20
