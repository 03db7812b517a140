"""Images on disk: paths, image_list, arrays; above them checking, then stacking and packing."""
