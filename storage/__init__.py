"""Images on disk: paths, image_list, arrays; stacking uses them, checking that, packing all."""
