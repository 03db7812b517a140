"""Images on disk: paths, image_list, arrays; above them stacking, then checking, then packing."""
