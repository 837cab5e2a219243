"""What the pages that keyhole writes share: one look (style.py), and names that do not lie over each other (labels.py).

Every page is one HTML file with inline SVG: no script, nothing fetched from anywhere.
"""
