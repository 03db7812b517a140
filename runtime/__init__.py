"""What keeps a run alive and observable; it never changes a number of the training.

In the order of a run: flags (with ranges), terminal, agreement, topology, image_source,
device_batches, bad_images, assemble, resume, log (with peak_flops); then cpu_kernels,
comm_counter, step_profile.
"""
