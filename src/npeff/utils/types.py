"""Types that several rooms share."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]
else:
    Array = Any  # configs need not wait for numpy: `--help` answers at once
