"""A checkpoint written while training goes on."""
