from ._reads import Lanes
from ._streamer import Streamer

OUTCOMES: tuple[str, ...]

class Loader:
    experts: int
    bytes: int
    bytes_unused: int
    def __init__(self, streamer: Streamer, lanes: Lanes) -> None: ...
    def load(self, layer: int, expert: int) -> int: ...
    def used(self) -> int: ...
