"""Before anything is imported: pictures without a display, whichever test comes first."""

import ctypes.util
import os

if ctypes.util.find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")
