"""`keyhole demo`: every method on the embedded model and task, with a table and a page at the end."""
