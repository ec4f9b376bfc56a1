"""Numbers do not depend on units, nor on how a setting is written; see `asked`."""

import asked
import pytest

pytestmark = pytest.mark.usefixtures("fast_compilation")
test_twins = asked.tests_of("phases")
