"""What keeps a run alive and observable; it can skip a bad step but never alters a good one.

Read config, run, process, agreement, session (with watchdog), log, record, devices, resume,
image_source, device_batches; then step_profile, evaluation, tensor_parallel.
"""

import os

# Read when torch is imported. Its C++ warnings are not for users: "Tried to pass options to
# ProcessGroupGloo::split" on each rank with a GPU, IPv6 sockets that cannot be opened.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
