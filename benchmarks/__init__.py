"""The suite of times and errors, and every figure of the paper; none of it is imported by the package."""
