"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of optional data (recorded counts, request bodies, traces); tests that need it skip without it."""
    folder = Path(os.environ.get("TOKENLANE_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"optional data is not here: set TOKENLANE_SHARED or put it at {folder}")
    return folder
