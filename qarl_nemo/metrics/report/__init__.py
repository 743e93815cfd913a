"""The HTML report and the summary figure, drawn from run directories alone: none of it loads torch."""

from qarl_nemo.metrics.report.page import write_report
from qarl_nemo.metrics.report.summary_figure import write_summary_figure

__all__ = ["write_report", "write_summary_figure"]
