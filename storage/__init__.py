"""Images on disk: image_list, arrays; stacking uses them, checking that, packing all."""
