"""What keeps a run alive and observable; it can skip a bad step but never alters a good one.

Read config, run, process, agreement, session (with watchdog), log, record, devices, resume,
initial_values, image_source, device_batches, bad_images; then topology, step_profile, evaluation
and tensor_parallel.
"""
