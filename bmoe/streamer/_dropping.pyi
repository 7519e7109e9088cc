import numpy as np
import numpy.typing as npt

def select(
    weights: npt.NDArray[np.float32], ids: npt.NDArray[np.int32], slot_of: npt.NDArray[np.int32], threshold: float
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], float]: ...
