"""Zeroth-order perturbation and update: of one element, of a flat unit, of a packed (8-bit) unit, of rows of a table."""
