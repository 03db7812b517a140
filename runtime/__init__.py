"""What keeps a run alive and observable; nothing here changes a number of the training.

Read config, flags, session (with agreement and watchdog), step_guard, meter, log, record, resume,
image_source, device_batches (with loader_workers), bad_images (with bad_images_csv); then topology,
run_profile (with step_profile and comm_counter), cpu_kernels, peak_flops, and the small ones:
ranges, signals, terminal.
"""
