"""What keeps a run alive and observable: read config.py, run.py, session.py, monitor.py first."""

import os

# Read when torch is imported. Its C++ warnings are not for users: "Tried to pass options to
# ProcessGroupGloo::split" on each rank with a GPU, IPv6 sockets that cannot be opened.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
