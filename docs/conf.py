"""How Sphinx builds the documents: ``make docs``. Any warning, a broken link or anchor too, ends the build."""

project = "Twodoor"
author = "The Twodoor authors"
project_copyright = author

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
nitpicky = True

# Headings get the anchors that GitHub gives them, so that a link works in both places.
myst_heading_anchors = 4

html_theme = "furo"
html_title = "Twodoor"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_permalinks_icon = "#"
