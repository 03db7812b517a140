"""Getting a data set ready: list it, find what is broken, pack it, copy it to node-local disk.

    python prepare.py index DIR                      list it once, beside it in DIR.index
    python prepare.py scan DIR                       decode everything, name what is broken
    python prepare.py pack SRC DST --max-side 512    tar shards with an index; --data DST trains

A parallel file system serves a hundred large files better than a million small ones: pack where you
can, from a login node or a job of one node. `pack` may be stopped and started again. Its parts are
in storage/.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import os
import sys
from collections.abc import Sequence

import data
import mesh
from runtime import terminal
from runtime.ranges import Parser, filled, whole
from storage.checking import scan
from storage.image_list import told_often
from storage.packing import pack


def main(argv: Sequence[str] | None = None) -> int:
    """The three commands; exit status 1 where images are broken or it failed, 2 for bad usage."""
    parser = Parser("prepare.py", description="List, check and pack images.")
    commands = parser.add_subparsers(dest="command", required=True)
    cores = mesh.process_cores()
    for name, helped in (
        ("index", "list the images once, in DIR.index, which training then uses"),
        ("scan", "decode every image and name the broken ones"),
        ("pack", "put all images into tar shards, which training reads with --data DST"),
    ):
        command = commands.add_parser(name, help=helped)
        command.add_argument(
            "dir", type=filled, metavar="SRC" if name == "pack" else "DIR", help="of images"
        )
        if name != "index":
            command.add_argument(
                "--workers",
                type=whole(1, 1024),
                default=cores,
                metavar="N",
                help="processes (default: the cores)",
            )
    command = commands.choices["pack"]
    command.add_argument("out", type=filled, metavar="DST", help="folder of the shards")
    command.add_argument(
        "--max-side",
        type=whole(1, 2**16),
        metavar="PIXELS",
        help="make larger images so small (default: copy all as they are)",
    )
    command.add_argument("--quality", type=whole(1, 100), default=90, help="of JPEG (default 90)")
    command.add_argument(
        "--shard-mib",
        type=whole(1, 2**20),
        metavar="MIB",
        help="of source a shard (default: a 64th of all, 16 to 1024)",
    )
    command = commands.choices["scan"]
    command.add_argument(
        "--out",
        type=filled,
        default="bad_images.csv",
        metavar="FILE",
        help="what is broken is appended to it (default bad_images.csv)",
    )
    args = parser.parse_args(argv)

    def say(text: str) -> None:
        print(text, flush=True)

    folder = args.dir.rstrip("/") or "/"
    try:
        if args.command == "scan":
            return 1 if scan(folder, args.out, args.workers, say) else 0
        if args.command == "pack":
            pack(folder, args.out, args.max_side, args.quality, args.shard_mib, args.workers, say)
        else:
            files = data.scan(folder, told_often(say, "listing"))
            data.save_index(files, f"{folder}.index")
            say(f"{folder}.index: {len(files)} images, {len(files.classes)} classes")
    except KeyboardInterrupt:
        print("prepare.py: interrupted; the same command goes on", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError) as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main says how it goes on
    terminal.make_safe()
    raise SystemExit(main())
