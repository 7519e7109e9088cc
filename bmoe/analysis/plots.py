"""One page that shows figures: they and the library that draws them in one file, nothing is fetched."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

_STYLE = (
    "body{font:15px/1.45 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "pre{overflow-x:auto;white-space:pre-wrap}"
)


def require_plotly() -> ModuleType:
    """plotly.graph_objects. Raises UsageError where it is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise UsageError("--html needs plotly: pip install 'bmoe[plots]', or pip install plotly") from None
    return go  # type: ignore[no-any-return]


def page(title: str, summary: Sequence[str], figures: Sequence[Any]) -> str:
    """The page: the summary as text, then the figures."""
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=i == 0, config={"displaylogo": False, "responsive": True})
        for i, figure in enumerate(figures)
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{html.escape(title)}</h1>\n"
        f"<pre>{html.escape(chr(10).join(summary))}</pre>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
