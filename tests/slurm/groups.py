"""A rank of test_slurm.py: builds the mesh for each size of group, and tells what it got."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mesh
from runtime import topology

CPU = torch.device("cpu")


def main(folder: Path) -> None:
    """Leave RANK.json: node, GCD, and by size the ranks of my two groups and the picture."""
    ranks = mesh.read_ranks(os.environ)
    mesh.init_ranks(ranks, CPU, timeout_minutes=2)
    groups, lines = {}, {}
    for size in (1, 2, 4, 8, 16):
        grid = mesh.build_mesh((16 // size, size), CPU)
        of = [dist.get_process_group_ranks(grid.get_group(d)) for d in ("replicate", "shard")]
        groups[size] = of
        lines[size] = topology.describe_topology(ranks, CPU, (16 // size, size), os.environ)
    told = {
        "node": os.environ["SLURMD_NODENAME"],
        "gcd": int(os.environ["ROCR_VISIBLE_DEVICES"]),
        "groups": groups,
        "lines": lines,
    }
    (folder / f"{ranks.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
