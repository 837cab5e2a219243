"""What all HTML pages of keyhole share: frame, elements and style sheet (frame.py), and charts (chart.py).

Every page is one HTML file with inline SVG, without scripts or external files.
"""
