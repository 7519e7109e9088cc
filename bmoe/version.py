"""The installed version."""

from importlib import metadata

try:
    __version__ = metadata.version("bmoe")
except metadata.PackageNotFoundError:  # a source tree that was built in place
    __version__ = "0+unknown"
