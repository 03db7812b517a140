"""A million images on disk: read image_list.py, checking.py, packing.py; tiff.py serves them."""
