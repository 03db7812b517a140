"""Take a pretrained model to another library, or bring one from there.

    python convert.py out/run model.pth --to official              the layout of the MAE release
    python convert.py out/run encoder.safetensors --to timm        or .pth; the encoder alone
    python convert.py out/run folder --to transformers             for ViTMAE's from_pretrained
    python convert.py vit_mae_folder model.pth --to official       from one layout to another

The first argument is a run, one of its checkpoints, or what any of these commands, the official
MAE, timm or transformers wrote; `train_fsdp.py --init-from` and probe.py read the same. Its parts
are in downstream/.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from downstream.export import LAYOUTS, write_pretrained
from downstream.pretrained import read_pretrained
from runtime import process
from runtime.config import Parser, filled, whole


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; SystemExit with status 2 for bad usage."""
    parser = Parser("convert.py", description="Write a pretrained model for another library.")
    parser.add_argument(
        "source", type=filled, metavar="RUN_OR_FILE", help="run, checkpoint, or weights"
    )
    parser.add_argument("out", type=filled, metavar="OUT", help="file or folder to write")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="layout to write")
    parser.add_argument(
        "--img-size",
        type=whole(1, 4096),
        metavar="PIXELS",
        help="resample the position tables for images of this size",
    )
    parser.add_argument(
        "--heads", type=whole(1, 4096), metavar="N", help="where the source does not say"
    )
    parser.add_argument(
        "--decoder-heads", type=whole(1, 4096), metavar="N", help="where the source does not say"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status: 1 where it failed, 2 for bad usage."""
    args = read_arguments(argv)
    try:
        pretrained = read_pretrained(args.source, (args.heads, args.decoder_heads))
        line = write_pretrained(pretrained, Path(args.out), args.to, args.img_size)
    except (OSError, ValueError) as error:
        print(f"convert.py: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.to}, from {pretrained.name}; load it with\n{line}")
    return 0


if __name__ == "__main__":
    process.make_safe()
    raise SystemExit(main())
