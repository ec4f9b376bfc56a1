"""Times and work-precision of the library, and every figure of the paper; none of it is imported by the package."""
