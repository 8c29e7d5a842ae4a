"""The page's server and a person at it, of a test file's own `store`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from labelling.test_page import serving
from labelling.test_server import SECRETS, Client, claim
from private_rlhf.labelling.server import LabelServer
from private_rlhf.labelling.store import AnswerStore


@pytest.fixture
def server(store: AnswerStore) -> Iterator[LabelServer]:
    with serving(store) as server:
        yield server


@pytest.fixture
def anna(server: LabelServer) -> Client:
    """A person whose browser has opened her link."""
    client = Client(server.port, SECRETS[0])
    assert client("POST", "/claim", claim(server.store.add_person("anna"), client.secret))[0] == 200
    return client
