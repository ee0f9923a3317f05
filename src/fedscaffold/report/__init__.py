"""Tables, figures and the page of a study: runs that belong together, kept in a folder, read back, shown."""

from fedscaffold.report import tables
from fedscaffold.report.page import page
from fedscaffold.report.study import Curve, Study, read, versions, write

__all__ = ["Curve", "Study", "page", "read", "tables", "versions", "write"]
