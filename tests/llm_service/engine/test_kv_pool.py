"""Reading a few blocks costs a few blocks, however large the pool is."""

import torch
from torch.profiler import ProfilerActivity, profile

from llm_service.engine.attention import KvPool


def test_reading_blocks_allocates_no_more_than_they_hold() -> None:
    pool = KvPool.allocate(2, 4096, 16, 2, 16, torch.float32, "cpu")
    pool.clear([3, 9])
    blocks = torch.tensor([3, 9])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        keys, values = pool.read(1, blocks)
    assert keys.shape == values.shape == (2, 2, 16, 16)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in watched.key_averages())
    assert allocated <= 2 * (keys.nbytes + values.nbytes)
