import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()
