"""Before anything is imported: pictures without a display, whichever test comes first."""

import os

os.environ.setdefault("MUJOCO_GL", "egl")
