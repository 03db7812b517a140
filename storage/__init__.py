"""A million images on disk: read image_list, checking, packing; tiff serves the last two."""
