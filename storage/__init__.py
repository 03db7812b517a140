"""A million images on disk: listed once, checked, packed into few files.

It never decides which rank reads which image when (data.py does), and never changes a pixel, except
where `pack --max-side` is asked to make images smaller. In reading order: image_list, checking,
packing; tiff serves both. prepare.py is the command.
"""
