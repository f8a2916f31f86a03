"""Which Chromium the tests use: the machine's own, none is downloaded."""

import os
import shutil

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The program that CHIASM_CHROMIUM names, or one on the path; None if there is none."""
    return os.environ.get("CHIASM_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
