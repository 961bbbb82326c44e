"""A plan as the configuration that other training tools read.

Start reading at `tools`: one function per tool. `records` has what they take and return, `shared` what holds
for all tools. Nothing here imports torch or one of the tools.
"""

from brimful.exports.records import Export, ExportSource, ExportTool
from brimful.exports.tools import write_export

__all__ = ["Export", "ExportSource", "ExportTool", "write_export"]
