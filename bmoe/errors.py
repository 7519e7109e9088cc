"""The errors a user can meet. Each carries one line that names the file, key or flag and what to do."""

from __future__ import annotations


class BmoeError(Exception):
    """Base of every error that bmoe raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(BmoeError):
    """A flag or argument that cannot be honoured (exit code 2)."""

    exit_code = 2


class ModelError(BmoeError):
    """A model file that is missing, damaged, or not what its name or header says."""


class MemoryBudgetError(UsageError):
    """A cache budget that cannot work on this model or machine; the message names one that can."""


class ReadError(BmoeError):
    """A read of expert weights failed or came short; the generation was stopped."""


class AbiError(BmoeError):
    """The installed llama-cpp-python is not the release, or not the layout, that bmoe was built for."""


class Cancelled(BmoeError):
    """The generation was stopped by `Engine.cancel()`."""
