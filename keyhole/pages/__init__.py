"""What all HTML pages of keyhole share: style sheet (style.py), frame (frame.py), charts (chart.py), and labels that do
not overlap (labels.py).

Every page is one HTML file with inline SVG, without scripts or external files.
"""
