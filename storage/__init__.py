"""A million images on disk: image_list.py; then checking.py and packing.py, which use tiff.py."""
