"""A zeroth-order run as one record per step: format, writer, replay, and where a run goes on from."""
