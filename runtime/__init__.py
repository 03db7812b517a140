"""What keeps a run alive and observable; it can skip a bad step but never alters a good one.

Read config, run, flags, session (with agreement and watchdog), step_guard, meter, log, record,
resume, initial_values, image_source (with synthetic_images), device_batches (with loader_workers),
bad_images (with bad_images_csv), memory_fit; then topology, run_profile (with step_profile and
comm_counter), evaluation, tensor_parallel, cpu_kernels, peak_flops, and the small ones: ranges,
model_size, progress, signals, terminal.
"""

import os

# Read when torch is imported. Its C++ warnings are not for users: "Tried to pass options to
# ProcessGroupGloo::split" on each rank with a GPU, IPv6 sockets that cannot be opened.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
