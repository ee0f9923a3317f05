"""Run folders, and everything made from them: tables, pages and tracker logs."""

from fedscaffold.runs import tables
from fedscaffold.runs.live import source_of, sources
from fedscaffold.runs.page import page
from fedscaffold.runs.run_folder import RunRecord, Study, read, versions, write
from fedscaffold.runs.view_model import Source

__all__ = [
    "RunRecord",
    "Source",
    "Study",
    "page",
    "read",
    "source_of",
    "sources",
    "tables",
    "versions",
    "write",
]
