"""A million images on disk: listed once, checked, packed into few files, copied to a node's disk.

It never decides which rank reads which image when (data.py does), and never changes a pixel, except
where `pack --max-side` is asked to make images smaller. In reading order: image_list (the list that
all processes of a node map), checking (decode everything), channel_stats (mean and deviation),
packing (tar shards), staged_images and staging (copies on the disk of a node); safe_files
serves them. prepare.py is the command; training uses image_list, and staging where
--stage-dir is given.
"""
