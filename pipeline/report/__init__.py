"""The one-page report: from a run directory's released files to HTML, Markdown and the privacy card."""
