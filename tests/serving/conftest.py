"""Every test of caches draws from the same seed."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)
    random.seed(11)
