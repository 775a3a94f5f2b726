"""Random bits that are the same on every machine and device."""

import hashlib

import numpy as np


def random_bits(count: int, *key: object) -> np.ndarray:
    """`count` bytes of the Philox counter generator keyed by `key`, uint8 [count]."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64))
    words = generator.random_raw(-(-count // 8)).astype("<u8")
    return words.view(np.uint8)[:count]
