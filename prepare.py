"""Prepare a data set: find broken images, measure it, pack it into few large files.

    python prepare.py scan DIR                       decode everything, name what is broken
    python prepare.py stats DIR                      mean and deviation per channel, for --data DIR
    python prepare.py pack SRC DST --max-side 512    tar shards with an index; --data DST trains
    python prepare.py pack SRC DST --stack B02,B03,B04,B08    scenes whose bands are files

A parallel file system serves a hundred large files better than a million small ones: pack where you
can, from a login node or a job of one node. The parts of these commands are in storage/.
"""

import argparse
from collections.abc import Sequence

from mesh import process_cores
from runtime import process
from runtime.config import Parser, int_in_range, nonempty
from runtime.image_source import check_folder
from storage.checking import check_can_save_stats, read_folder, save_stats
from storage.image_list import list_images
from storage.packing import PackOptions, pack

COMMANDS = {
    "scan": "decode every image, name the broken ones, count the kinds",
    "stats": "mean and deviation of each channel, which training on DIR then uses",
    "pack": "put all images into tar shards, which training reads with --data DST",
}


def band_names(text: str) -> tuple[str, ...]:
    """Be an argparse type: names of bands, separated by commas, each once."""
    names = tuple(text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no list of names: give B02,B03,B04")
    return names


def read_command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; SystemExit with status 2 for bad usage."""
    parser = Parser("prepare.py", doc=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help in COMMANDS.items():
        add = commands.add_parser(name, help=help).add_argument
        add("dir", type=nonempty, metavar="DIR", help="folder of images")
        if name == "pack":
            add("out", type=nonempty, metavar="DST", help="folder of the shards")
            help = "make larger pictures so small (default: as they are)"
            add("--max-side", type=int_in_range(1, 2**16), metavar="PIXELS", help=help)
            help = "make one array of each scene, of the files whose names end with these bands"
            add("--stack", type=band_names, default=(), metavar="BANDS", help=help)
        help = "only images whose name or folder matches, such as '*_rgb.tif'; may be repeated"
        add("--include", type=nonempty, action="append", default=[], metavar="PATTERN", help=help)
        help = "no images whose name or folder matches, such as masks; may be repeated"
        add("--exclude", type=nonempty, action="append", default=[], metavar="PATTERN", help=help)
        help = "as --nodata=-9999: a missing pixel (default: what a GeoTIFF says, and NaN)"
        add("--nodata", type=float, metavar="NUMBER", help=help)
        cores = process_cores()
        help = "processes (default: the number of cores)"
        add("--workers", type=int_in_range(1, 1024), default=cores, metavar="N", help=help)
    return parser.parse_args(argv)


def run_command(args: argparse.Namespace) -> int:
    """Run a command -> 1 where `scan` finds broken images, else 0; raises what it raises."""
    check_folder(args.dir, "DIR")
    if args.command == "stats" and args.nodata is not None:
        what = f"training on {args.dir} takes {args.nodata:g} as a value"
        raise ValueError(f"{what}: type `prepare.py pack {args.dir} DST --nodata={args.nodata:g}`")
    if args.command == "pack":
        options = PackOptions(max_side=args.max_side, nodata=args.nodata, bands=args.stack)
        pack(args.dir, args.out, args.workers, options, include=args.include, exclude=args.exclude)
        return 0
    files = list_images(args.dir, include=args.include, exclude=args.exclude)
    if args.command == "stats":
        check_can_save_stats(files)
    report = read_folder(files, args.workers, args.nodata)
    if args.command == "stats":
        report.print_kinds()
        save_stats(files, report)
        return 0
    for problem in report.problems:
        print(problem)
    report.print_kinds()
    print(f"{len(report.problems)} of {len(files)} images cannot be read")
    return 1 if report.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command -> exit status: 1 where images are broken or it failed, 2 for bad usage."""
    args = read_command_line(argv)
    try:
        return run_command(args)
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
        process.print_error(str(error), "prepare.py")
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    process.ignore_output_errors()
    raise SystemExit(main())
