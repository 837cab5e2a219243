"""AdaLOMO's update of a matrix and of a vector, and the step that both share."""
