"""The metrics that are built in: the 20 most used of OSWorld's 369 tasks ("infeasible", the twentieth, is a rule of scoring), a few more
that are short, and practice_*, which are this project's own. Each stands in the module named here and is imported when it is asked for:
office libraries (requirements-desktop.txt) load only where a document is read.

A metric is metric(result, expected, **options) -> a score from 0 to 1. What a user writes: docs/osworld.md, "A metric of your own".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

_MODULES = {
  "text": (
    "check_include_exclude check_direct_json_object exact_match check_list check_json_settings compare_text_file is_extension_installed "
    "check_config_status compare_csv check_thunderbird_prefs match_in_list is_in_list check_json diff_text_file file_contains check_csv "
    "practice_lines"
  ),
  "table": "compare_table",
  "documents": (
    "compare_docx_files compare_docx_tables compare_pdfs compare_subscript_contains compare_archive practice_document_runs"
  ),
  "slides": "compare_pptx_files",
  "pages": "is_expected_url_pattern_match is_expected_active_tab is_expected_tabs compare_images",
}
METRICS: dict[str, str] = {name: module for module, names in _MODULES.items() for name in names.split()}
ARCHIVED = {
  "text": "compare_text_file", "pdf": "compare_pdfs", "docx": "compare_docx_files", "ppt": "compare_pptx_files", "csv": "compare_csv",
  "table": "compare_table", "image": "compare_images",
}  # fmt: skip


def metric(name: str) -> Callable[..., float]:
  """The built-in metric of that name; KeyError for another."""
  return getattr(importlib.import_module(f"envs.osworld.metrics.{METRICS[name]}"), name)
