"""Numbers do not depend on units, nor on how a setting is written; see `asked`."""

import asked

test_twins = asked.tests_of("wide")
