"""Prepare a data set: find broken images, measure it, pack it into few large files.

    python prepare.py scan DIR                       decode everything, name what is broken
    python prepare.py stats DIR                      mean and deviation per channel, for --data DIR
    python prepare.py pack SRC DST --max-side 512    tar shards with an index; --data DST trains

A parallel file system serves a hundred large files better than a million small ones: pack where you
can, from a login node or a job of one node. The parts of these commands are in storage/.
"""

import argparse
import sys
from collections.abc import Sequence

from mesh import process_cores
from runtime import process
from runtime.config import Parser, filled, whole
from runtime.image_source import check_folder
from storage.checking import check_images, write_stats
from storage.packing import pack

COMMANDS = {
    "scan": "decode every image and name the broken ones",
    "stats": "mean and deviation of each channel, which training on DIR then uses",
    "pack": "put all images into tar shards, which training reads with --data DST",
}


def read_command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; SystemExit with status 2 for bad usage."""
    parser = Parser("prepare.py", doc=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help in COMMANDS.items():
        add = commands.add_parser(name, help=help).add_argument
        add("dir", type=filled, metavar="DIR", help="folder of images")
        help = "processes (default: the number of cores)"
        add("--workers", type=whole(1, 1024), default=process_cores(), metavar="N", help=help)
        if name == "pack":
            add("out", type=filled, metavar="DST", help="folder of the shards")
            help = "make larger pictures so small (default: as they are)"
            add("--max-side", type=whole(1, 2**16), metavar="PIXELS", help=help)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command -> exit status: 1 where images are broken or it failed, 2 for bad usage."""
    args = read_command_line(argv)
    folder = args.dir.rstrip("/") or "/"
    try:
        check_folder(folder, "DIR")
        if args.command == "scan":
            return 1 if check_images(folder, args.workers, print) else 0
        if args.command == "stats":
            write_stats(folder, args.workers, print)
        else:
            pack(folder, args.out, args.workers, print, args.max_side)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    process.make_safe()
    raise SystemExit(main())
