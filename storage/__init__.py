"""A million images on disk: listed once, checked, packed into few files, kept on a node's own disk.

It never decides which image is read when, nor changes a pixel that is read. In reading order:
image_list, checking, packing, staging.
"""
