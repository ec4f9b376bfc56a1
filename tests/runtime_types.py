"""The checker of types and shapes that the tests run the package with: see `conftest`."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for mypy
