"""Prepare a data set: list it, find broken images, measure it, pack it into few large files.

    python prepare.py index DIR                      list it once, beside it in DIR.index
    python prepare.py scan DIR                       decode everything, name what is broken
    python prepare.py stats DIR                      mean and deviation per channel, for --data DIR
    python prepare.py pack SRC DST --max-side 512    tar shards with an index; --data DST trains

A parallel file system serves a hundred large files better than a million small ones: pack where you
can, from a login node or a job of one node. `pack` can be stopped; the same command resumes it. The
parts of these commands are in storage/.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import sys
from collections.abc import Sequence

import mesh
from runtime import process
from runtime.config import Parser, filled, whole
from runtime.process import throttled_progress
from storage.channel_stats import write_stats
from storage.checking import check_images
from storage.image_list import list_images, save_index
from storage.packing import pack


def read_command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; SystemExit with status 2 for bad usage."""
    parser = Parser("prepare.py", description="List, check and pack images.")
    commands = parser.add_subparsers(dest="command", required=True)
    index = commands.add_parser(
        "index", help="list the images once, in DIR.index, which training then uses"
    )
    scan = commands.add_parser("scan", help="decode every image and name the broken ones")
    stats = commands.add_parser(
        "stats", help="mean and deviation of each channel, which training on DIR then uses"
    )
    packing = commands.add_parser(
        "pack", help="put all images into tar shards, which training reads with --data DST"
    )
    for command, name in ((index, "DIR"), (scan, "DIR"), (stats, "DIR"), (packing, "SRC")):
        command.add_argument("dir", type=filled, metavar=name, help="folder of images")
    for command in (scan, stats, packing):
        command.add_argument(
            "--workers",
            type=whole(1, 1024),
            default=mesh.process_cores(),
            metavar="N",
            help="processes (default: the number of cores)",
        )
    scan.add_argument(
        "--out",
        type=filled,
        default="bad_images.csv",
        metavar="FILE",
        help="append broken images to it (default bad_images.csv)",
    )
    packing.add_argument("out", type=filled, metavar="DST", help="folder of the shards")
    packing.add_argument(
        "--max-side",
        type=whole(1, 2**16),
        metavar="PIXELS",
        help="make larger images so small (default: copy all as they are)",
    )
    packing.add_argument("--quality", type=whole(1, 100), default=90, help="of JPEG (default 90)")
    packing.add_argument(
        "--shard-mib",
        type=whole(1, 2**20),
        metavar="MIB",
        help="size of the source of one shard (default: a 64th of all, 16 to 1024)",
    )
    return parser.parse_args(argv)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command -> exit status: 1 where images are broken or it failed, 2 for bad usage."""
    args = read_command_line(argv)
    folder = args.dir.rstrip("/") or "/"
    try:
        if args.command == "scan":
            return 1 if check_images(folder, args.out, args.workers, say) else 0
        if args.command == "stats":
            write_stats(folder, args.workers, say)
        elif args.command == "pack":
            pack(folder, args.out, args.max_side, args.quality, args.shard_mib, args.workers, say)
        else:
            files = list_images(folder, throttled_progress(say, "listing"))
            save_index(files, f"{folder}.index")
            say(f"{folder}.index: {len(files)} images, {len(files.classes)} classes")
    except KeyboardInterrupt:
        print("prepare.py: interrupted; run the same command to resume", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError) as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main says how to resume
    process.make_safe()
    raise SystemExit(main())
